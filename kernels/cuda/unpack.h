// From packed codes (kernels/block_layout.h) to levels, four int8 a word: two codes of a byte's
// nibbles are neighbours in a byte permutation's selector, so eight codes are looked up without
// taking them apart. That fixes the order in which they come out:
//
//   a word of K, dim quads a (low nibbles) and b, of one token    first  a0 b0 a1 b1   second  a2 b2 a3 b3
//   a word of V, token quads a (low nibbles) and b, of one dim    the same, of the quads' lanes
//
// Whoever multiplies with them puts the other factor in that order (interleaved_dim, interleaved_token).
#pragma once

#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/codebooks.h"
#include "kernels/cuda/host_device.h"
#include "kernels/cuda/word_ops.h"

namespace polykv::cuda {

/// The levels of a codebook, byte c that of code c.
struct LevelTable {
  uint32_t words[16];
};

/// bits: 3 to 6, or 8, which needs no table. On the host.
inline LevelTable level_table(uint32_t bits) {
  LevelTable table{};
  if (bits == 8) return table;
  const Codebook& book = codebook(bits);
  for (uint32_t code = 0; code < book.size; ++code) {
    table.words[code / 4] |= uint32_t{static_cast<uint8_t>(book.levels[code])} << (8 * (code % 4));
  }
  return table;
}

/// Eight codes' levels.
struct LevelPair {
  uint32_t first;
  uint32_t second;
};

/// Of byte i of first (word 0) or second (word 1): which of 8 dims of two quads.
POLYKV_HOST_DEVICE constexpr uint32_t interleaved_dim(uint32_t word, uint32_t byte) {
  return byte % 2 * 4 + word * 2 + byte / 2;
}

namespace unpack_detail {

/// ff for each of the four low nibbles that is 1, 00 for those that are 0.
POLYKV_HOST_DEVICE inline uint32_t byte_mask(uint32_t nibbles) {
  return byte_perm(0xff00U, 0, nibbles);
}
POLYKV_HOST_DEVICE inline uint32_t choose(uint32_t mask, uint32_t ones, uint32_t zeros) {
  return (ones & mask) | (zeros & ~mask);
}

/// Levels of four codes. selector: their three low bits; bit3, bit4, bit5: the others, each a nibble
/// of 0 or 1.
template <uint32_t Bits>
POLYKV_HOST_DEVICE inline uint32_t look_up4(const LevelTable& table, uint32_t selector,
                                            uint32_t bit3, uint32_t bit4, uint32_t bit5) {
  uint32_t found[8];
  POLYKV_UNROLL
  for (uint32_t i = 0; i < (1U << (Bits - 3)); ++i)
    found[i] = byte_perm(table.words[2 * i], table.words[2 * i + 1], selector);
  if constexpr (Bits > 3) {
    const uint32_t mask = byte_mask(bit3);
    POLYKV_UNROLL
    for (uint32_t i = 0; i < (1U << (Bits - 4)); ++i)
      found[i] = choose(mask, found[2 * i + 1], found[2 * i]);
  }
  if constexpr (Bits > 4) {
    const uint32_t mask = byte_mask(bit4);
    POLYKV_UNROLL
    for (uint32_t i = 0; i < (1U << (Bits - 5)); ++i)
      found[i] = choose(mask, found[2 * i + 1], found[2 * i]);
  }
  if constexpr (Bits > 5) found[0] = choose(byte_mask(bit5), found[1], found[0]);
  return found[0];
}

}  // namespace unpack_detail

/// Levels of eight codes. low: their four low bits, a nibble each (of 3 bits, the fourth is
/// anything); bit4, bit5: the bits above, each a nibble of 0 or 1.
template <uint32_t Bits>
POLYKV_HOST_DEVICE inline LevelPair look_up(const LevelTable& table, uint32_t low,
                                            uint32_t bit4 = 0, uint32_t bit5 = 0) {
  const uint32_t selector = low & 0x77777777U;
  const uint32_t bit3 = (low >> 3) & 0x11111111U;
  return {unpack_detail::look_up4<Bits>(table, selector, bit3, bit4, bit5),
          unpack_detail::look_up4<Bits>(table, selector >> 16, bit3 >> 16, bit4 >> 16, bit5 >> 16)};
}

/// Bits `bit` of the bytes as the low nibbles', bits `bit` + step as the high ones'.
POLYKV_HOST_DEVICE inline uint32_t nibble_bits(uint32_t word, uint32_t bit, uint32_t step) {
  return ((word >> bit) & 0x01010101U) | ((word >> (bit + step)) & 0x01010101U) << 4;
}

/// The 16 dims of one token in one piece of K, as packed.
template <uint32_t Bits>
struct KPiece {
  uint32_t low[2];
  uint32_t high;

  /// codes: the tensor's; piece_dim: the first of the 16.
  POLYKV_HOST_DEVICE static KPiece load(const uint8_t* codes, uint32_t token, uint32_t piece_dim,
                                        uint32_t head_dim) {
    const uint32_t group = token % kPieceTokens / 16;
    const uint32_t piece = token / kPieceTokens * (head_dim / kPieceDims) + piece_dim / kPieceDims;
    const uint8_t* at = codes + piece * Bits * kPieceLineBytes + token % 16 * 4;
    KPiece result;
    result.low[0] = load_word(at + 2 * group * kPieceLineBytes);
    result.low[1] = load_word(at + (2 * group + 1) * kPieceLineBytes);
    result.high = 0;
    if constexpr (Bits == 5) {
      result.high = load_word(at + kPieceLowLines * kPieceLineBytes) >> (4 * group);
    } else if constexpr (Bits == 6) {
      result.high = load_word(at + (kPieceLowLines + group) * kPieceLineBytes);
    }
    return result;
  }
  /// Of dims 8 half to 8 half + 7.
  POLYKV_HOST_DEVICE LevelPair levels(const LevelTable& table, uint32_t half) const {
    if constexpr (Bits == 5) return look_up<5>(table, low[half], nibble_bits(high, 2 * half, 1));
    if constexpr (Bits == 6)
      return look_up<6>(table, low[half], nibble_bits(high, 4 * half, 2),
                        nibble_bits(high, 4 * half + 1, 2));
    return look_up<4>(table, low[half]);
  }
};

/// The 8 token quads of a group of V, of one dim, as packed.
template <uint32_t Bits>
struct VGroup {
  uint32_t planes[Bits];

  POLYKV_HOST_DEVICE static VGroup load(const uint8_t* codes, uint32_t group, uint32_t dim,
                                        uint32_t head_dim) {
    VGroup result;
    POLYKV_UNROLL
    for (uint32_t plane = 0; plane < Bits; ++plane)
      result.planes[plane] = load_word(codes + ((group * Bits + plane) * head_dim + dim) * 4);
    return result;
  }
  /// Of quads 2 pair and 2 pair + 1 of the group. pair: 0 to 3, known when compiled.
  POLYKV_HOST_DEVICE LevelPair levels(const LevelTable& table, uint32_t pair) const {
    if constexpr (Bits == 3) {
      if (pair < kV3Planes) return look_up<3>(table, planes[pair]);
      // The planes' spare fourth bits.
      return look_up<3>(table, (planes[0] & 0x88888888U) >> 3 | (planes[1] & 0x88888888U) >> 2 |
                                   (planes[2] & 0x88888888U) >> 1);
    }
    if constexpr (Bits == 5)
      return look_up<5>(table, planes[pair], nibble_bits(planes[4], 2 * pair, 1));
    return look_up<4>(table, planes[pair]);
  }
};

}  // namespace polykv::cuda
