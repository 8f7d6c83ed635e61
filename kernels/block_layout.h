// How codes lie inside a block of 64 tokens of one kv_head. All codecs build their blocks of these
// parts; the reference uses the functions below, the fast paths walk the same bytes in order.
//
//   quantised   [K gains fp16 x 64][V gains fp16 x 64][K codes][V codes]
//               256 + 8 Dk * K bits + 8 Dv * V bits bytes; kernels/profiles.h has the bits
//   paper-k8v3  [V norms fp16 x 64][K8][V3]                            128 + 64 Dk + 24 Dv bytes
//   exact       [K rows: 64 x Dk elements][V rows: 64 x Dv elements]   element = the source dtype
//
// K8, int8 + 128, for dot products over 4 dims at a time with one token a lane (Dk is a multiple of
// 4):
//
//      dim quad 0                              dim quad 1
//     +-----------+-----------+--   --+-----------+-----------+--
//     | token 0   | token 1   |  ...  | token 63  | token 0   | ...
//     | d0 d1 d2 d3           |       |           | d4 d5 d6 d7
//     +-----------+-----------+--   --+-----------+-----------+--
//
// K4, K5, K6 (Dk is a multiple of 16): pieces of 32 tokens and 16 dims, which are 64 * bits bytes;
// first those of tokens 0 to 31, dims ascending, then those of tokens 32 to 63. A piece is
// `bits` lines of 64 bytes; a line has one token a lane of 4 bytes, byte b for dim b of a dim quad:
//
//      line     tokens    bits 7-4        bits 3-0
//      0        0-15      dim quad 1      dim quad 0      the low four bits of the codes
//      1        0-15      dim quad 3      dim quad 2
//      2        16-31     dim quad 1      dim quad 0
//      3        16-31     dim quad 3      dim quad 2
//
//      K5, line 4: bit j is the fifth bit of dim quad j % 4, of tokens 0-15 (j < 4) or 16-31
//      K6, line 4: bits 2 j and 2 j + 1 are the fifth and sixth of dim quad j, of tokens 0-15
//          line 5: the same of tokens 16-31
//
// A shift brings any 64 codes of a line to where one byte permutation looks them up: a table of 16,
// 32 or 64 levels, repeated to 64, makes the bits of neighbours above a code harmless.
//
// V8, int8, for products over 4 tokens at a time with one dim a lane. Token quad l holds the tokens
// l, l+32, l+16, l+48:
//
//      token quad 0                                  token quad 1
//     +------------------+------------------+--    --+------------------+--
//     | dim 0            | dim 1            |  ...   | dim 0            | ...
//     | t0 t32 t16 t48   | t0 t32 t16 t48   |        | t1 t33 t17 t49   |
//     +------------------+------------------+--    --+------------------+--
//
// V3, V4, V5: the 16 token quads form two groups of 8. A group is as many planes of
// [dim][4 tokens] bytes as a code has bits. The first four planes of V4 and V5 are nibbles, and V5
// has one more for the fifth bits; V3 has three, whose spare fourth bits carry quads 6 and 7:
//
//      V4, V5   bits 7-4   bits 3-0        V3       bit 7        bits 6-4   bit 3        bits 2-0
//      plane 0  quad 1     quad 0          plane 0  quad 7 bit 0 quad 1     quad 6 bit 0 quad 0
//      plane 1  quad 3     quad 2          plane 1  quad 7 bit 1 quad 3     quad 6 bit 1 quad 2
//      plane 2  quad 5     quad 4          plane 2  quad 7 bit 2 quad 5     quad 6 bit 2 quad 4
//      plane 3  quad 7     quad 6
//      plane 4  V5: bit j is the fifth bit of quad j
#pragma once

#include <cstdint>

#include "include/internal/geometry.h"
#include "include/internal/segment_format.h"
#include "kernels/profiles.h"

namespace polykv {

inline constexpr uint64_t kGainBytes = kBlockTokens * 2;  // one fp16 a token
inline constexpr uint32_t kTokenQuads = 16;
inline constexpr int kKeyBias = 128;  // added to K codes

struct QuantizedBlock {
  static constexpr uint64_t k_gains = 0;
  static constexpr uint64_t v_gains = kGainBytes;
  static constexpr uint64_t k_codes = 2 * kGainBytes;
  static constexpr uint64_t v_codes(const ProfileRule& rule, const LayerGeometry& g) {
    return k_codes + kBlockTokens / 8 * rule.k.bits * g.k_head_dim;
  }
  static constexpr uint64_t bytes(const ProfileRule& rule, const LayerGeometry& g) {
    return v_codes(rule, g) + kBlockTokens / 8 * rule.v.bits * g.v_head_dim;
  }
};

/// K's or V's part of a quantised block.
struct TensorPart {
  TensorRule rule;
  uint32_t head_dim;
  bool is_k;
  uint64_t gains;  // offsets in the block
  uint64_t codes;
};
constexpr TensorPart k_part(const ProfileRule& rule, const LayerGeometry& g) {
  return {rule.k, g.k_head_dim, true, QuantizedBlock::k_gains, QuantizedBlock::k_codes};
}
constexpr TensorPart v_part(const ProfileRule& rule, const LayerGeometry& g) {
  return {rule.v, g.v_head_dim, false, QuantizedBlock::v_gains, QuantizedBlock::v_codes(rule, g)};
}

struct PaperBlock {
  static constexpr uint64_t v_norms = 0;
  static constexpr uint64_t k_codes = kGainBytes;
  static constexpr uint64_t v_codes(const LayerGeometry& g) {
    return k_codes + kBlockTokens * g.k_head_dim;
  }
  static constexpr uint64_t bytes(const LayerGeometry& g) {
    return v_codes(g) + kBlockTokens / 8 * 3 * g.v_head_dim;
  }
};

/// Byte of a K8 code. token < 64.
constexpr uint64_t k8_offset(uint32_t token, uint32_t dim) {
  return (dim / 4) * 4 * kBlockTokens + token * 4 + dim % 4;
}

/// Some bits of a code inside its tensor's codes.
struct CodePlace {
  uint64_t offset;  // of the byte
  uint32_t shift;
};

inline constexpr uint32_t kPieceTokens = 32;
inline constexpr uint32_t kPieceDims = 16;
inline constexpr uint32_t kPieceLineBytes = 64;
inline constexpr uint32_t kPieceLowLines = 4;

/// Byte of a line of K4, K5 or K6 that belongs to (token, dim).
inline uint64_t k_line_offset(uint32_t token, uint32_t dim, uint32_t k_head_dim, uint32_t bits,
                              uint32_t line) {
  const uint64_t piece =
      uint64_t{token / kPieceTokens} * (k_head_dim / kPieceDims) + dim / kPieceDims;
  return (piece * bits + line) * kPieceLineBytes + token % 16 * 4 + dim % 4;
}
inline CodePlace k_low_place(uint32_t token, uint32_t dim, uint32_t k_head_dim, uint32_t bits) {
  const uint32_t line = token % kPieceTokens / 16 * 2 + dim % kPieceDims / 8;
  return {k_line_offset(token, dim, k_head_dim, bits, line), dim % 8 / 4 * 4};
}
/// Where the bits above the fourth are. bits: 5 or 6.
inline CodePlace k_high_place(uint32_t token, uint32_t dim, uint32_t k_head_dim, uint32_t bits) {
  const uint32_t group = token % kPieceTokens / 16;
  const uint32_t quad = dim % kPieceDims / 4;
  const uint32_t line = kPieceLowLines + (bits == 6 ? group : 0);
  return {k_line_offset(token, dim, k_head_dim, bits, line),
          bits == 6 ? 2 * quad : 4 * group + quad};
}

/// Which of the 16 quads a token is in, and where in it.
constexpr uint32_t token_quad(uint32_t token) {
  return token % kTokenQuads;
}
constexpr uint32_t token_lane(uint32_t token) {
  const uint32_t sixteen = token / kTokenQuads;  // tokens l, l+16, l+32, l+48 are lanes 0, 2, 1, 3
  return sixteen % 2 * 2 + sixteen / 2;
}
inline uint32_t quad_token(uint32_t quad, uint32_t lane) {
  constexpr uint32_t kTokens[4] = {0, 32, 16, 48};
  return quad + kTokens[lane];
}

/// Byte of a V8 code.
inline uint64_t v8_offset(uint32_t token, uint32_t dim, uint32_t v_head_dim) {
  return (uint64_t{token_quad(token)} * v_head_dim + dim) * 4 + token_lane(token);
}

inline constexpr uint32_t kGroupQuads = 8;

/// Byte of a plane of V3, V4 or V5 that holds bits of (token, dim).
constexpr uint64_t v_plane_offset(uint32_t token, uint32_t dim, uint32_t v_head_dim, uint32_t bits,
                                  uint32_t plane) {
  const uint64_t group = token_quad(token) / kGroupQuads;
  return ((group * bits + plane) * v_head_dim + dim) * 4 + token_lane(token);
}
/// V4 and V5.
inline CodePlace v_low_place(uint32_t token, uint32_t dim, uint32_t v_head_dim, uint32_t bits) {
  const uint32_t quad = token_quad(token) % kGroupQuads;
  return {v_plane_offset(token, dim, v_head_dim, bits, quad / 2), quad % 2 * 4};
}
/// V5.
inline CodePlace v_high_place(uint32_t token, uint32_t dim, uint32_t v_head_dim) {
  return {v_plane_offset(token, dim, v_head_dim, 5, 4), token_quad(token) % kGroupQuads};
}

constexpr uint64_t v3_offset(uint32_t token, uint32_t dim, uint32_t plane, uint32_t v_head_dim) {
  return v_plane_offset(token, dim, v_head_dim, 3, plane);
}
inline constexpr uint32_t kV3Planes = 3;

constexpr uint32_t v3_get(const uint8_t* codes, uint32_t token, uint32_t dim, uint32_t v_head_dim) {
  const uint32_t quad = token_quad(token) % kGroupQuads;
  const auto plane = [&](uint32_t p) { return codes[v3_offset(token, dim, p, v_head_dim)]; };
  if (quad < 6) return (plane(quad / 2) >> (quad % 2 * 4)) & 7U;
  const uint32_t bit = quad == 6 ? 3 : 7;
  return ((plane(0) >> bit) & 1U) | ((plane(1) >> bit) & 1U) << 1 | ((plane(2) >> bit) & 1U) << 2;
}

/// Into zeroed planes.
inline void v3_put(uint8_t* codes, uint32_t token, uint32_t dim, uint32_t v_head_dim,
                   uint32_t code) {
  const uint32_t quad = token_quad(token) % kGroupQuads;
  const auto put = [&](uint32_t p, uint32_t bits) {
    uint8_t& byte = codes[v3_offset(token, dim, p, v_head_dim)];
    byte = static_cast<uint8_t>(byte | bits);
  };
  if (quad < 6) {
    put(quad / 2, code << (quad % 2 * 4));
  } else {
    for (uint32_t p = 0; p < kV3Planes; ++p) put(p, ((code >> p) & 1U) << (quad == 6 ? 3 : 7));
  }
}

inline uint32_t place_get(const uint8_t* codes, CodePlace place, uint32_t mask) {
  return (uint32_t{codes[place.offset]} >> place.shift) & mask;
}
/// Into zeroed bytes.
inline void place_put(uint8_t* codes, CodePlace place, uint32_t value) {
  codes[place.offset] = static_cast<uint8_t>(codes[place.offset] | value << place.shift);
}

/// K codes of 4 to 6 bits; k_put into zeroed bytes.
inline uint32_t k_get(const uint8_t* codes, uint32_t token, uint32_t dim, uint32_t k_head_dim,
                      uint32_t bits) {
  const uint32_t low = place_get(codes, k_low_place(token, dim, k_head_dim, bits), 15);
  if (bits == 4) return low;
  return low | place_get(codes, k_high_place(token, dim, k_head_dim, bits), bits == 6 ? 3 : 1) << 4;
}
inline void k_put(uint8_t* codes, uint32_t token, uint32_t dim, uint32_t k_head_dim, uint32_t bits,
                  uint32_t code) {
  place_put(codes, k_low_place(token, dim, k_head_dim, bits), code & 15U);
  if (bits > 4) place_put(codes, k_high_place(token, dim, k_head_dim, bits), code >> 4);
}

/// V codes of 3 to 5 bits; v_put into zeroed bytes.
inline uint32_t v_get(const uint8_t* codes, uint32_t token, uint32_t dim, uint32_t v_head_dim,
                      uint32_t bits) {
  if (bits == 3) return v3_get(codes, token, dim, v_head_dim);
  const uint32_t low = place_get(codes, v_low_place(token, dim, v_head_dim, bits), 15);
  return bits == 4 ? low : low | place_get(codes, v_high_place(token, dim, v_head_dim), 1) << 4;
}
inline void v_put(uint8_t* codes, uint32_t token, uint32_t dim, uint32_t v_head_dim, uint32_t bits,
                  uint32_t code) {
  if (bits == 3) return v3_put(codes, token, dim, v_head_dim, code);
  place_put(codes, v_low_place(token, dim, v_head_dim, bits), code & 15U);
  if (bits > 4) place_put(codes, v_high_place(token, dim, v_head_dim), code >> 4);
}

}  // namespace polykv
