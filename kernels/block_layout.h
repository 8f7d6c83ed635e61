// How codes lie inside a block of 64 tokens of one kv_head. All codecs build their blocks of these
// parts; the reference uses the functions below, the fast paths walk the same bytes in order.
//
//   k8v8        [K gains fp16 x 64][V gains fp16 x 64][K8][V8]         256 + 64 Dk + 64 Dv bytes
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
// V8, int8, for products over 4 tokens at a time with one dim a lane. Token quad l holds the tokens
// l, l+32, l+16, l+48:
//
//      token quad 0                                  token quad 1
//     +------------------+------------------+--    --+------------------+--
//     | dim 0            | dim 1            |  ...   | dim 0            | ...
//     | t0 t32 t16 t48   | t0 t32 t16 t48   |        | t1 t33 t17 t49   |
//     +------------------+------------------+--    --+------------------+--
//
// V3, indices of 3 bits. The 16 token quads form two groups of 8. A group is three planes of
// [dim][4 tokens] bytes, each byte two nibbles; quads 0-5 of the group use three bits of a nibble
// each, and the spare fourth bits carry quads 6 and 7:
//
//              bit 7        bits 6-4    bit 3        bits 2-0
//     plane 0  quad 7 bit 0 quad 1      quad 6 bit 0 quad 0
//     plane 1  quad 7 bit 1 quad 3      quad 6 bit 1 quad 2
//     plane 2  quad 7 bit 2 quad 5      quad 6 bit 2 quad 4
#pragma once

#include <cstdint>

#include "include/internal/geometry.h"
#include "include/internal/segment_format.h"

namespace polykv {

inline constexpr uint64_t kGainBytes = kBlockTokens * 2;  // one fp16 a token
inline constexpr uint32_t kTokenQuads = 16;
inline constexpr int kKeyBias = 128;  // added to K codes

struct K8V8Block {
  static constexpr uint64_t k_gains = 0;
  static constexpr uint64_t v_gains = kGainBytes;
  static constexpr uint64_t k_codes = 2 * kGainBytes;
  static uint64_t v_codes(const LayerGeometry& g) { return k_codes + kBlockTokens * g.k_head_dim; }
  static uint64_t bytes(const LayerGeometry& g) { return v_codes(g) + kBlockTokens * g.v_head_dim; }
};

struct PaperBlock {
  static constexpr uint64_t v_norms = 0;
  static constexpr uint64_t k_codes = kGainBytes;
  static uint64_t v_codes(const LayerGeometry& g) { return k_codes + kBlockTokens * g.k_head_dim; }
  static uint64_t bytes(const LayerGeometry& g) {
    return v_codes(g) + kBlockTokens / 8 * 3 * g.v_head_dim;
  }
};

/// Byte of a K8 code. token < 64.
inline uint64_t k8_offset(uint32_t token, uint32_t dim) {
  return (dim / 4) * 4 * kBlockTokens + token * 4 + dim % 4;
}

/// Which of the 16 quads a token is in, and where in it.
inline uint32_t token_quad(uint32_t token) {
  return token % kTokenQuads;
}
inline uint32_t token_lane(uint32_t token) {
  constexpr uint32_t kLanes[4] = {0, 2, 1, 3};  // tokens l, l+16, l+32, l+48
  return kLanes[token / kTokenQuads];
}
inline uint32_t quad_token(uint32_t quad, uint32_t lane) {
  constexpr uint32_t kTokens[4] = {0, 32, 16, 48};
  return quad + kTokens[lane];
}

/// Byte of a V8 code.
inline uint64_t v8_offset(uint32_t token, uint32_t dim, uint32_t v_head_dim) {
  return (uint64_t{token_quad(token)} * v_head_dim + dim) * 4 + token_lane(token);
}

inline constexpr uint32_t kV3GroupQuads = 8;
inline constexpr uint32_t kV3Planes = 3;

/// Byte of a V3 plane that holds bits of (token, dim).
inline uint64_t v3_offset(uint32_t token, uint32_t dim, uint32_t plane, uint32_t v_head_dim) {
  const uint64_t group = token_quad(token) / kV3GroupQuads;
  return ((group * kV3Planes + plane) * v_head_dim + dim) * 4 + token_lane(token);
}

inline uint32_t v3_get(const uint8_t* codes, uint32_t token, uint32_t dim, uint32_t v_head_dim) {
  const uint32_t quad = token_quad(token) % kV3GroupQuads;
  const auto plane = [&](uint32_t p) { return codes[v3_offset(token, dim, p, v_head_dim)]; };
  if (quad < 6) return (plane(quad / 2) >> (quad % 2 * 4)) & 7U;
  const uint32_t bit = quad == 6 ? 3 : 7;
  return ((plane(0) >> bit) & 1U) | ((plane(1) >> bit) & 1U) << 1 | ((plane(2) >> bit) & 1U) << 2;
}

/// Into zeroed planes.
inline void v3_put(uint8_t* codes, uint32_t token, uint32_t dim, uint32_t v_head_dim,
                   uint32_t code) {
  const uint32_t quad = token_quad(token) % kV3GroupQuads;
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

}  // namespace polykv
