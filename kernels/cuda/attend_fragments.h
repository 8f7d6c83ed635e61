// A block's codes as fragments of the tensor cores' products (kernels/cuda/thread.h), for attend_tiled_kernel.h. Whatever the
// order of dims and tokens is in which the two factors of a product meet, it is the same for both.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/tensor_arguments.h"

namespace polykv::cuda {

inline constexpr uint32_t kTokenGroups = kBlockTokens / 8;          // of a block, 8 tokens each
inline constexpr uint32_t kQuadGroups = kTokenQuads / kGroupQuads;  // 32 tokens each

struct alignas(16) Words4 {
  uint32_t words[4];
};
struct alignas(8) Words2 {
  uint32_t words[2];
};
/// The weights of a block as fragments: [32 tokens][term].
struct Weights {
  uint32_t words[kQuadGroups][2][4];
  float old_factor[2];
  float new_factor[2];
};

/// The first token of a group of eight. Groups 4 j to 4 j + 3 are the 32 tokens of a group of V's quads.
POLYKV_HOST_DEVICE inline uint32_t first_token(uint32_t group) {
  return group / 4 * kGroupQuads + group % 2 * 32 + group / 2 % 2 * 16;
}

/// Four words, a piece of K's levels: of `token` and dims 16 piece to 16 piece + 15.
template <uint32_t Bits>
POLYKV_HOST_DEVICE inline Words4 key_words(const PackedTensor& tensor, const uint8_t* bytes,
                                           uint32_t token, uint32_t piece) {
  const uint8_t* codes = bytes + tensor.codes;
  const uint32_t dims = tensor.head_dim;
  Words4 result{};
  if constexpr (Bits == 8) {
    POLYKV_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t quad = piece * 4 + i;
      if (quad * 4 < dims)
        result.words[i] = load_word(codes + (quad * kBlockTokens + token) * 4) ^ 0x80808080U;
    }
  } else if (piece * kPieceDims < dims) {
    const auto packed = KPiece<Bits>::load(codes, token, piece * kPieceDims, dims);
    POLYKV_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
      const LevelPair levels = packed.levels(tensor.levels, half);
      result.words[2 * half] = levels.first;
      result.words[2 * half + 1] = levels.second;
    }
  }
  return result;
}

/// Two words of V's levels of a dim: of quads 2 pair and 2 pair + 1 of a group of eight.
template <uint32_t Bits>
POLYKV_HOST_DEVICE inline Words2 value_words(const PackedTensor& tensor, const uint8_t* bytes,
                                             uint32_t group, uint32_t pair, uint32_t dim) {
  const uint8_t* codes = bytes + tensor.codes;
  const uint32_t dims = tensor.head_dim;
  Words2 result{};
  if (dim >= dims) return result;
  if constexpr (Bits == 8) {
    POLYKV_UNROLL
    for (uint32_t i = 0; i < 2; ++i)
      result.words[i] = load_word(codes + ((group * kGroupQuads + 2 * pair + i) * dims + dim) * 4);
  } else {
    const LevelPair levels = v_pair_levels<Bits>(codes, tensor.levels, group, pair, dim, dims);
    result.words[0] = levels.first;
    result.words[1] = levels.second;
  }
  return result;
}

/// body(a number as a type) with the bits of codes.
template <typename Body>
POLYKV_HOST_DEVICE inline void with_k_bits(uint32_t bits, const Body& body) {
  switch (bits) {
    case 4:
      return body(std::integral_constant<uint32_t, 4>());
    case 5:
      return body(std::integral_constant<uint32_t, 5>());
    case 6:
      return body(std::integral_constant<uint32_t, 6>());
    default:
      return body(std::integral_constant<uint32_t, 8>());
  }
}
template <typename Body>
POLYKV_HOST_DEVICE inline void with_v_bits(uint32_t bits, const Body& body) {
  switch (bits) {
    case 3:
      return body(std::integral_constant<uint32_t, 3>());
    case 4:
      return body(std::integral_constant<uint32_t, 4>());
    case 5:
      return body(std::integral_constant<uint32_t, 5>());
    default:
      return body(std::integral_constant<uint32_t, 8>());
  }
}

/// One of two fp16 numbers.
POLYKV_HOST_DEVICE inline float half_of(uint32_t two, uint32_t index) {
  return from_f16(static_cast<uint16_t>(two >> (16 * index)));
}
/// Bits in the halves that are negative, infinite or no number: no encoder writes that.
POLYKV_HOST_DEVICE inline uint32_t bad_gains(uint32_t two) {
  return (two | ((two & 0x7fff7fffU) + 0x04000400U)) & 0x80008000U;
}

/// Fixed-point numbers, rounded to nearest, as 16 bits each; plus 128, so that the high byte is the high term.
POLYKV_HOST_DEVICE inline uint32_t two_numbers(float first, float second) {
  // Adding 1.5 x 2^23 leaves the integer in the low bits.
  constexpr float kToLowBits = 12582912.0F + 128.0F;
  first += kToLowBits;
  second += kToLowBits;
  uint32_t words[2];
  memcpy(&words[0], &first, sizeof first);
  memcpy(&words[1], &second, sizeof second);
  return byte_perm(words[0], words[1], 0x5410);
}

/// Row r (0 or 1) of a lane's two. numbers: [group of 8 tokens], two_numbers of the lane's tokens. In the order of V's
/// levels: of quads l and l + 1 with 8 bits the words are of the tokens l, l + 32, l + 16, l + 48, and the same plus 1; else
/// l, l + 1, l + 32, l + 33, and those plus 16.
POLYKV_HOST_DEVICE inline void put_weights(uint32_t v_bits, uint32_t r,
                                           const uint32_t (&numbers)[kTokenGroups],
                                           Weights& weights) {
  POLYKV_UNROLL
  for (uint32_t j = 0; j < kQuadGroups; ++j) {
    uint32_t pairs[4];
    POLYKV_UNROLL
    for (uint32_t i = 0; i < 4; ++i) pairs[i] = numbers[4 * j + i];
    if (v_bits == 8) {
      const uint32_t even[2] = {byte_perm(pairs[0], pairs[1], 0x5410),
                                byte_perm(pairs[2], pairs[3], 0x5410)};
      const uint32_t odd[2] = {byte_perm(pairs[0], pairs[1], 0x7632),
                               byte_perm(pairs[2], pairs[3], 0x7632)};
      pairs[0] = even[0];
      pairs[1] = even[1];
      pairs[2] = odd[0];
      pairs[3] = odd[1];
    }
    POLYKV_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t first = pairs[2 * half];
      const uint32_t second = pairs[2 * half + 1];
      weights.words[j][0][r + 2 * half] = byte_perm(first, second, 0x7531);
      weights.words[j][1][r + 2 * half] = byte_perm(first, second, 0x6420) ^ 0x80808080U;
    }
  }
}
/// A row that is not there.
POLYKV_HOST_DEVICE inline void leave_out(Weights& weights, uint32_t r) {
  POLYKV_UNROLL
  for (uint32_t j = 0; j < kQuadGroups; ++j) {
    POLYKV_UNROLL
    for (uint32_t term = 0; term < 2; ++term) {
      weights.words[j][term][r] = 0;
      weights.words[j][term][r + 2] = 0;
    }
  }
  weights.old_factor[r] = 0;
  weights.new_factor[r] = 0;
}

}  // namespace polykv::cuda
