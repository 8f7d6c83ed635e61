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

/// What permutations look levels up in. 3 and 4 bits: byte c is the level of code c. 5 and 6 bits: of the
/// positive levels p[i], since the negative ones are theirs, for each 16 of them p[0] to p[7] and p[i] xor p[i + 8].
struct LevelTable {
  uint32_t words[8];
};

/// bits: 3 to 6, or 8, which needs no table. On the host.
inline LevelTable level_table(uint32_t bits) {
  LevelTable table{};
  if (bits == 8) return table;
  const auto put = [&](uint32_t place, uint32_t byte) {
    table.words[place / 4] |= (byte & 0xffU) << (8 * (place % 4));
  };
  const Codebook& book = codebook(bits);
  const int8_t* positive = &book.levels[book.size / 2];
  for (uint32_t i = 0; i < (bits < 5 ? book.size : book.size / 2); ++i) {
    if (bits < 5) {
      put(i, static_cast<uint32_t>(book.levels[i]));
    } else {
      put(i, static_cast<uint32_t>(i % 16 < 8 ? positive[i] : positive[i] ^ positive[i - 8]));
    }
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

/// Four of 3 bits, or of 4 with the fourth apart (nibbles of 0 or 1).
template <uint32_t Bits>
POLYKV_HOST_DEVICE inline uint32_t look_up4(const uint32_t* table, uint32_t selector,
                                            uint32_t bit3) {
  const uint32_t zeros = byte_perm(table[0], table[1], selector);
  if constexpr (Bits == 3) return zeros;
  return choose(byte_mask(bit3), byte_perm(table[2], table[3], selector), zeros);
}

/// Four of 16 positive levels. The second permutation gives nothing where bit 3 is zero: there its
/// selector asks for a highest bit, which no positive level has.
POLYKV_HOST_DEVICE inline uint32_t positive4(const uint32_t* table, uint32_t selector,
                                             uint32_t selector_of_change) {
  return byte_perm(table[0], table[1], selector) ^
         byte_perm(table[2], table[3], selector_of_change);
}

/// Levels of four codes from the positive ones; sign: nibbles, 0 for the negative ones. None is zero,
/// so nothing is carried from byte to byte.
POLYKV_HOST_DEVICE inline uint32_t with_signs(uint32_t positive, uint32_t sign) {
  const uint32_t negative = byte_perm(0x00ffU, 0, sign);
  return (positive ^ negative) + (negative & 0x01010101U);
}

}  // namespace unpack_detail

/// Levels of eight codes. low: their four low bits, a nibble each (of 3 bits, the fourth is
/// anything); bit4, bit5: the bits above, each a nibble of 0 or 1.
template <uint32_t Bits>
POLYKV_HOST_DEVICE inline LevelPair look_up(const LevelTable& table, uint32_t low,
                                            uint32_t bit4 = 0, uint32_t bit5 = 0) {
  using namespace unpack_detail;
  if constexpr (Bits < 5) {
    const uint32_t selector = low & 0x77777777U;
    const uint32_t bit3 = Bits == 3 ? 0 : (low >> 3) & 0x11111111U;
    return {look_up4<Bits>(table.words, selector, bit3),
            look_up4<Bits>(table.words, selector >> 16, bit3 >> 16)};
  } else {
    // The code of the positive level of the same size: all bits of negative ones turn.
    const uint32_t sign = Bits == 5 ? bit4 : bit5;
    const uint32_t code = ~(low ^ sign * 15U);
    const uint32_t selector = code & 0x77777777U;
    const uint32_t change = code ^ 0x88888888U;
    uint32_t first = positive4(table.words, selector, change);
    uint32_t second = positive4(table.words, selector >> 16, change >> 16);
    if constexpr (Bits == 6) {
      const uint32_t upper = bit4 ^ sign ^ 0x11111111U;
      first = choose(byte_mask(upper), positive4(table.words + 4, selector, change), first);
      second = choose(byte_mask(upper >> 16),
                      positive4(table.words + 4, selector >> 16, change >> 16), second);
    }
    return {with_signs(first, sign), with_signs(second, sign >> 16)};
  }
}

/// Bits `bit` of the bytes as the low nibbles', bits `bit` + step as the high ones'.
POLYKV_HOST_DEVICE inline uint32_t nibble_bits(uint32_t word, uint32_t bit, uint32_t step) {
  const uint32_t high = bit + step;
  return ((word >> bit) & 0x01010101U) |
         ((high < 4 ? word << (4 - high) : word >> (high - 4)) & 0x10101010U);
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

/// Of quads 2 pair and 2 pair + 1 of a group of V, of one dim, and no others. pair: 0 to 3.
template <uint32_t Bits>
POLYKV_HOST_DEVICE inline LevelPair v_pair_levels(const uint8_t* codes, const LevelTable& table,
                                                  uint32_t group, uint32_t pair, uint32_t dim,
                                                  uint32_t head_dim) {
  const auto plane = [&](uint32_t index) {
    return load_word(codes + ((group * Bits + index) * head_dim + dim) * 4);
  };
  if constexpr (Bits == 3) {
    if (pair < kV3Planes) return look_up<3>(table, plane(pair));
    return look_up<3>(table, (plane(0) & 0x88888888U) >> 3 | (plane(1) & 0x88888888U) >> 2 |
                                 (plane(2) & 0x88888888U) >> 1);
  } else if constexpr (Bits == 5) {
    return look_up<5>(table, plane(pair), nibble_bits(plane(4), 2 * pair, 1));
  } else {
    return look_up<4>(table, plane(pair));
  }
}

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
