// AVX2: a block's codes to levels, one byte each. A step takes the eight tokens whose codes share
// bytes: eight neighbours of K, two token quads of V. Dims are a multiple of 16.

constexpr uint32_t kTileDims = 32;  // a vector of levels of one token
constexpr uint32_t kStepTokens = 8;
constexpr uint32_t kSteps = kBlockTokens / kStepTokens;

/// [8 tokens, dims], rows as close to each other as whole tiles are. Behind the last dim of a row is
/// nothing of use.
struct LevelRows {
  explicit LevelRows(uint32_t dims) : stride((dims + kTileDims - 1) / kTileDims * kTileDims) {}
  int8_t* row(uint32_t i) { return bytes + size_t{i} * stride; }

  uint32_t stride;
  alignas(64) int8_t bytes[size_t{kStepTokens} * kMaxHeadDim];
};
static_assert(kMaxHeadDim % kTileDims == 0);

/// The token of a step's row i.
inline uint32_t step_token(bool is_k, uint32_t step, uint32_t i) {
  return is_k ? step * kStepTokens + i : quad_token(2 * step + i / 4, i % 4);
}

POLYKV_TARGET inline __m256i load256(const void* bytes) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(bytes));
}
POLYKV_TARGET inline __m256i load_halves(const uint8_t* low, const uint8_t* high) {
  return _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}
POLYKV_TARGET inline void store_levels(int8_t* row, __m256i levels) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(row), levels);
}

/// Looks codes up: sixteen levels a table, the bits above the fourth choose among the tables. Bits
/// above a code of 3 or 4 bits, up to the seventh, are harmless.
template <uint32_t Bits>
struct LevelTables {
  static constexpr uint32_t kCount = Bits <= 4 ? 1 : 1U << (Bits - 4);
  __m256i tables[kCount];

  POLYKV_TARGET LevelTables() {
    const auto* levels = reinterpret_cast<const __m128i*>(codebook(Bits).levels.data());
    for (uint32_t i = 0; i < kCount; ++i)
      tables[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128(levels + i));
    if (Bits == 3) tables[0] = _mm256_unpacklo_epi64(tables[0], tables[0]);
  }
  /// low: codes' low four bits. bit4, bit5: theirs in each byte's sign.
  POLYKV_TARGET __m256i at(__m256i low, __m256i bit4, __m256i bit5) const {
    __m256i levels = _mm256_shuffle_epi8(tables[0], low);
    if constexpr (Bits > 4)
      levels = _mm256_blendv_epi8(levels, _mm256_shuffle_epi8(tables[1], low), bit4);
    if constexpr (Bits > 5) {
      const __m256i upper = _mm256_blendv_epi8(_mm256_shuffle_epi8(tables[2], low),
                                               _mm256_shuffle_epi8(tables[3], low), bit4);
      levels = _mm256_blendv_epi8(levels, upper, bit5);
    }
    return levels;
  }
};

POLYKV_TARGET inline __m256i low_nibbles(__m256i bytes) {
  return _mm256_and_si256(bytes, _mm256_set1_epi8(15));
}
POLYKV_TARGET inline __m256i high_nibbles(__m256i bytes) {
  return low_nibbles(_mm256_srli_epi16(bytes, 4));
}

/// The four dim quads of 8 tokens (from `token` on) in a piece, 4 bytes a token.
template <uint32_t Bits>
POLYKV_TARGET inline void piece_levels(const uint8_t* piece, uint32_t token,
                                       const LevelTables<Bits>& tables, __m256i* quads) {
  const uint32_t group = token % kPieceTokens / 16;
  const uint32_t at = token % 16 * 4;
  const __m256i low[2] = {load256(piece + group * 2 * kPieceLineBytes + at),
                          load256(piece + (group * 2 + 1) * kPieceLineBytes + at)};
  __m256i high = _mm256_setzero_si256();
  if (Bits > 4) {
    const uint32_t line = kPieceLowLines + (Bits == 6 ? group : 0);
    high = load256(piece + line * kPieceLineBytes + at);
  }
  // The bits of the next quad are brought into each byte's sign by shifts to the left.
  if (Bits == 5 && group == 0) high = _mm256_slli_epi16(high, 4);
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    const __m256i nibbles =
        quad % 2 == 0 ? low_nibbles(low[quad / 2]) : high_nibbles(low[quad / 2]);
    const int bit4 = Bits == 6 ? 7 - 2 * quad : 3 - quad;
    const int bit5 = 6 - 2 * quad;
    quads[quad] = tables.at(nibbles, Bits > 4 ? _mm256_slli_epi16(high, bit4) : high,
                            Bits > 5 ? _mm256_slli_epi16(high, bit5) : high);
  }
}

/// rows[i]: lane i of each of the eight vectors, in order.
POLYKV_TARGET inline void transpose8(const __m256i* in, __m256i* rows) {
  __m256i pairs[8];
  __m256i fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = _mm256_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      fours[4 * i + 2 * j] = _mm256_unpacklo_epi64(pairs[4 * i + j], pairs[4 * i + 2 + j]);
      fours[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[4 * i + j], pairs[4 * i + 2 + j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x31);
  }
}

/// 32 dims of 8 tokens, or the 16 that are left, as eight dim quads.
template <uint32_t Bits>
POLYKV_TARGET inline void k_quads(const uint8_t* codes, uint32_t token, uint32_t dim, uint32_t dims,
                                  const LevelTables<(Bits == 8 ? 4 : Bits)>& tables,
                                  __m256i* quads) {
  const bool is_whole = dims - dim >= kTileDims;
  if constexpr (Bits == 8) {
    const __m256i bias = _mm256_set1_epi8(static_cast<char>(kKeyBias));
    const uint8_t* quad = codes + k8_offset(token, dim);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 8; ++i) {
      quads[i] = i < 4 || is_whole ? _mm256_xor_si256(load256(quad + i * 4 * kBlockTokens), bias)
                                   : _mm256_setzero_si256();
    }
  } else {
    const uint8_t* piece = codes + k_line_offset(token - token % 16, dim, dims, Bits, 0);
    piece_levels<Bits>(piece, token, tables, quads);
    if (is_whole) {
      piece_levels<Bits>(piece + Bits * kPieceLineBytes, token, tables, quads + 4);
    } else {
      for (int i = 4; i < 8; ++i) quads[i] = _mm256_setzero_si256();
    }
  }
}

/// K of 4 to 6 bits, or of 8.
template <uint32_t Bits>
POLYKV_TARGET void k_levels(const uint8_t* codes, uint32_t dims, uint32_t step, LevelRows& levels) {
  const LevelTables<(Bits == 8 ? 4 : Bits)> tables;
  for (uint32_t dim = 0; dim < dims; dim += kTileDims) {
    __m256i quads[8];
    __m256i rows[8];
    k_quads<Bits>(codes, step * kStepTokens, dim, dims, tables, quads);
    transpose8(quads, rows);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 8; ++i) store_levels(levels.row(i) + dim, rows[i]);
  }
}

/// A token quad's levels of 32 dims, in order 0-3 and 16-19, 4-7 and 20-23, ..., 4 bytes a dim, to
/// four rows from `row` on.
POLYKV_TARGET inline void store_token_quad(const __m256i* in, uint32_t row, uint32_t dim,
                                           LevelRows& levels) {
  const __m256i by_token = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __m256i x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x[i] = _mm256_shuffle_epi8(in[i], by_token);
  const __m256i pairs[4] = {_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[0], x[1]),
                            _mm256_unpacklo_epi32(x[2], x[3]), _mm256_unpackhi_epi32(x[2], x[3])};
  store_levels(levels.row(row) + dim, _mm256_unpacklo_epi64(pairs[0], pairs[2]));
  store_levels(levels.row(row + 1) + dim, _mm256_unpackhi_epi64(pairs[0], pairs[2]));
  store_levels(levels.row(row + 2) + dim, _mm256_unpacklo_epi64(pairs[1], pairs[3]));
  store_levels(levels.row(row + 3) + dim, _mm256_unpackhi_epi64(pairs[1], pairs[3]));
}

/// A plane's bytes of 32 dims in that order; those behind the last dim are not read.
POLYKV_TARGET inline void load_plane(const uint8_t* plane, bool is_whole, __m256i* out) {
  alignas(32) uint8_t bytes[kTileDims * 4] = {};
  if (!is_whole) {
    std::memcpy(bytes, plane, sizeof bytes / 2);
    plane = bytes;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) out[i] = load_halves(plane + i * 16, plane + 64 + i * 16);
}

/// 32 dims, from `dim` on, of the two token quads of V of 3 to 5 bits that share a plane's bytes, or,
/// with 3 bits, the two that are spread over all planes.
template <uint32_t Bits>
POLYKV_TARGET inline void v_pair_levels(const uint8_t* planes, uint32_t dims, uint32_t dim,
                                        const LevelTables<Bits>& tables, uint32_t pair,
                                        LevelRows& levels) {
  const auto load = [&](uint32_t plane, __m256i* out) POLYKV_TARGET {
    load_plane(planes + (size_t{plane} * dims + dim) * 4, dims - dim >= kTileDims, out);
  };
  __m256i out[4];
  if (Bits == 3 && pair == kV3Planes) {
    __m256i all[kV3Planes][4];
    for (uint32_t plane = 0; plane < kV3Planes; ++plane) load(plane, all[plane]);
#pragma GCC unroll 2
    for (uint32_t odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i) {
        const int shift = odd == 0 ? 3 : 7;
        const auto bit = [&](uint32_t plane, int to, int mask) POLYKV_TARGET {
          return _mm256_and_si256(_mm256_srli_epi16(all[plane][i], shift - to),
                                  _mm256_set1_epi8(static_cast<char>(mask)));
        };
        const __m256i code =
            _mm256_or_si256(_mm256_or_si256(bit(0, 0, 1), bit(1, 1, 2)), bit(2, 2, 4));
        out[i] = tables.at(code, code, code);
      }
      store_token_quad(out, 4 * odd, dim, levels);
    }
    return;
  }
  __m256i low[4];
  __m256i high[4] = {};
  load(pair, low);
  if (Bits == 5) load(4, high);
#pragma GCC unroll 2
  for (uint32_t odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
      const __m256i bit4 = _mm256_slli_epi16(high[i], static_cast<int>(7 - 2 * pair - odd));
      out[i] = tables.at(odd == 0 ? low_nibbles(low[i]) : high_nibbles(low[i]), bit4, bit4);
    }
    store_token_quad(out, 4 * odd, dim, levels);
  }
}

/// V of 3 to 5 bits, or of 8.
template <uint32_t Bits>
POLYKV_TARGET void v_levels(const uint8_t* codes, uint32_t dims, uint32_t step, LevelRows& levels) {
  const LevelTables<(Bits == 8 ? 4 : Bits)> tables;
  constexpr uint32_t kGroupSteps = kGroupQuads / 2;
  for (uint32_t dim = 0; dim < dims; dim += kTileDims) {
    if constexpr (Bits == 8) {
      for (uint32_t odd = 0; odd < 2; ++odd) {
        __m256i bytes[4];
        load_plane(codes + (size_t{2 * step + odd} * dims + dim) * 4, dims - dim >= kTileDims,
                   bytes);
        store_token_quad(bytes, 4 * odd, dim, levels);
      }
    } else {
      v_pair_levels<Bits>(codes + size_t{step / kGroupSteps} * Bits * dims * 4, dims, dim, tables,
                          step % kGroupSteps, levels);
    }
  }
}

using StepLevels = void (*)(const uint8_t* codes, uint32_t dims, uint32_t step, LevelRows& levels);

POLYKV_TARGET inline StepLevels step_levels(const TensorRule& rule, bool is_k) {
  switch (rule.bits) {
    case 3:
      return v_levels<3>;
    case 4:
      return is_k ? k_levels<4> : v_levels<4>;
    case 5:
      return is_k ? k_levels<5> : v_levels<5>;
    case 6:
      return k_levels<6>;
    default:
      return is_k ? k_levels<8> : v_levels<8>;
  }
}
