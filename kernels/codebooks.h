// What a code of 3 to 6 bits means, and the rotation of the rows that have them: part of the
// segment format (docs/segment-format.md).
//
// A row is rotated before it is coded: each dim's sign is turned or not (kRotationSigns), then
// an orthonormal Walsh-Hadamard transform mixes the dims of each block, where the blocks are the
// powers of two whose sum is head_dim, the largest first (80 = 64 + 16). What comes out is close to
// Gaussian whatever the row was, and that is what the levels are made for. V of 3 bits is not
// turned (kernels/profiles.h).
//
// Levels are integers that fit int8, so that products with them may be int8's; a decoder multiplies
// by the row's gain and rotates back. They are the Lloyd-Max levels of a Gaussian with deviation
// `unit`, moved to integers so that its squared error is least: 0.002, 0.06, 0.6 and 2.0 % above
// that of real-valued levels at 3, 4, 5 and 6 bits.
#pragma once

#include <array>
#include <bit>
#include <cassert>
#include <cstdint>

#include "include/internal/geometry.h"

namespace polykv {

/// How an encoder chooses a row's scale: it tries this many, first, first + step, ..., each times
/// norm / sqrt(head_dim), and takes the one whose codes have the least squared error, the smaller
/// one of two.
inline constexpr uint32_t kScaleCandidates = 13;

struct Codebook {
  uint32_t bits;
  uint32_t size;  // 2^bits
  float unit;     // an encoder's matter, like the next two: the deviation that rows are brought to
  double first_scale;
  double scale_step;
  std::array<int8_t, 64> levels;  // ascending, symmetric; those from `size` on are zero

  constexpr double scale(uint32_t candidate) const { return first_scale + scale_step * candidate; }
};

namespace codebook_detail {

template <size_t Half>
constexpr Codebook symmetric(uint32_t bits, float unit, double first_scale, double scale_step,
                             const std::array<int8_t, Half>& positive) {
  Codebook book{bits, 2 * Half, unit, first_scale, scale_step, {}};
  for (size_t i = 0; i < Half; ++i) {
    book.levels[Half + i] = positive[i];
    book.levels[Half - 1 - i] = static_cast<int8_t>(-positive[i]);
  }
  return book;
}

}  // namespace codebook_detail

// The scales are those that measured best for 13 of them on Gaussian rows of 64 and 128 values: a
// row's largest value decides, and more levels reach it with a smaller scale.
inline constexpr Codebook kCodebooks[] = {
    codebook_detail::symmetric<4>(3, 40.92F, 0.78, 0.045, {10, 31, 55, 88}),
    codebook_detail::symmetric<8>(4, 38.15F, 0.74, 0.045, {5, 15, 25, 36, 48, 62, 79, 104}),
    codebook_detail::symmetric<16>(5, 29.74F, 0.72, 0.035,
                                   {2, 6, 10, 14, 18, 22, 26, 31, 36, 41, 47, 53, 60, 69, 80, 97}),
    codebook_detail::symmetric<32>(
        6, 28.81F, 0.74, 0.025, {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                 33, 36, 39, 42, 45, 48, 51, 54, 58, 62, 66, 71, 77, 84, 93, 108}),
};
inline constexpr uint32_t kMinCodebookBits = 3;
inline constexpr uint32_t kMaxCodebookBits = 6;

/// bits: 3 to 6.
constexpr const Codebook& codebook(uint32_t bits) {
  assert(bits >= kMinCodebookBits && bits <= kMaxCodebookBits);
  return kCodebooks[bits - kMinCodebookBits];
}

/// Rotated head_dims are multiples of this.
inline constexpr uint32_t kRotationDims = 16;

/// Outputs of the generator splitmix64 from this state on; bit i % 64 of number i / 64 is one where
/// the sign of dim i turns.
inline constexpr uint64_t kRotationSeed = 0x706f6c796b7630;  // "polykv0"
inline constexpr auto kRotationSigns = [] {
  std::array<uint64_t, kMaxHeadDim / 64> signs{};
  uint64_t state = kRotationSeed;
  for (uint64_t& word : signs) {
    state += 0x9e3779b97f4a7c15;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    word = z ^ (z >> 31);
  }
  return signs;
}();
constexpr bool rotation_turns(uint32_t dim) {
  return ((kRotationSigns[dim / 64] >> (dim % 64)) & 1U) != 0;
}

/// Calls action(first dim, dim count) for each block of the transform.
template <typename Action>
constexpr void for_each_rotation_block(uint32_t head_dim, Action action) {
  for (uint32_t first = 0; first < head_dim;) {
    const uint32_t count = std::bit_floor(head_dim - first);
    action(first, count);
    first += count;
  }
}

}  // namespace polykv
