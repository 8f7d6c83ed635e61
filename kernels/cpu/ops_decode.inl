// AVX2: a block's codes to rows of any dtype, through the levels of its 64 tokens (one byte each, in
// the L1 cache). Included behind ops_rotated.inl.
//
// Levels are integers that fit int8 and the transform only adds and subtracts, so that it is exact
// in 16 bits: at most 256 dims * 108 < 2^15 (kMostFusedDims). The gain multiplies what comes out.

constexpr uint32_t kTileDims = 32;  // a vector of levels of one token

/// [64 tokens, dims], rows as close to each other as whole tiles are.
struct LevelRows {
  explicit LevelRows(uint32_t dims) : stride((dims + kTileDims - 1) / kTileDims * kTileDims) {}
  int8_t* row(uint32_t token) { return bytes + size_t{token} * stride; }

  uint32_t stride;
  alignas(64) int8_t bytes[size_t{kBlockTokens} * kMaxHeadDim];
};

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
    const __m256i nibbles = quad % 2 == 0 ? low_nibbles(low[quad / 2]) : high_nibbles(low[quad / 2]);
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

/// The dim quads of 8 tokens, `count` of them from a quad of K8 on; zero behind them.
POLYKV_TARGET inline void k8_levels(const uint8_t* quad, uint32_t count, __m256i* quads) {
  const __m256i bias = _mm256_set1_epi8(static_cast<char>(kKeyBias));
#pragma GCC unroll 8
  for (uint32_t i = 0; i < 8; ++i) {
    quads[i] = i < count ? _mm256_xor_si256(load256(quad + i * 4 * kBlockTokens), bias)
                         : _mm256_setzero_si256();
  }
}

/// 32 dims of 8 tokens; `dims`: how many of them there are.
template <uint32_t Bits>
POLYKV_TARGET inline void k_tile(const uint8_t* codes, uint32_t token, uint32_t dim, uint32_t dims,
                                 const LevelTables<(Bits == 8 ? 4 : Bits)>& tables,
                                 __m256i* rows) {
  __m256i quads[8];
  if constexpr (Bits == 8) {
    const uint8_t* quad = codes + size_t{dim} * kBlockTokens + token * 4;
    dims - dim >= kTileDims ? k8_levels(quad, 8, quads) : k8_levels(quad, (dims - dim) / 4, quads);
  } else {
    const uint8_t* piece = codes + k_line_offset(token - token % 16, dim, dims, Bits, 0);
    piece_levels<Bits>(piece, token, tables, quads);
    if (dims - dim >= kTileDims) {
      piece_levels<Bits>(piece + Bits * kPieceLineBytes, token, tables, quads + 4);
    } else {
      for (int i = 4; i < 8; ++i) quads[i] = _mm256_setzero_si256();
    }
  }
  transpose8(quads, rows);
}

/// K of 4 to 6 bits, or of 8. What lies behind the last dim of a row is of no use.
template <uint32_t Bits>
POLYKV_TARGET void k_levels(const uint8_t* codes, uint32_t dims, LevelRows& levels) {
  const LevelTables<(Bits == 8 ? 4 : Bits)> tables;
  for (uint32_t token = 0; token < kBlockTokens; token += 8) {
    for (uint32_t dim = 0; dim < dims; dim += kTileDims) {
      __m256i rows[8];
      k_tile<Bits>(codes, token, dim, dims, tables, rows);
#pragma GCC unroll 8
      for (uint32_t i = 0; i < 8; ++i) store_levels(levels.row(token + i) + dim, rows[i]);
    }
  }
}

/// A token quad's levels of 32 dims, in order 0-3 and 16-19, 4-7 and 20-23, ..., 4 bytes a dim.
POLYKV_TARGET inline void store_token_quad(const __m256i* in, uint32_t quad, uint32_t dim,
                                           LevelRows& levels) {
  const __m256i by_token = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __m256i x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x[i] = _mm256_shuffle_epi8(in[i], by_token);
  const __m256i pairs[4] = {_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[0], x[1]),
                            _mm256_unpacklo_epi32(x[2], x[3]), _mm256_unpackhi_epi32(x[2], x[3])};
  store_levels(levels.row(quad_token(quad, 0)) + dim, _mm256_unpacklo_epi64(pairs[0], pairs[2]));
  store_levels(levels.row(quad_token(quad, 1)) + dim, _mm256_unpackhi_epi64(pairs[0], pairs[2]));
  store_levels(levels.row(quad_token(quad, 2)) + dim, _mm256_unpacklo_epi64(pairs[1], pairs[3]));
  store_levels(levels.row(quad_token(quad, 3)) + dim, _mm256_unpackhi_epi64(pairs[1], pairs[3]));
}

/// A plane's bytes of 32 dims in that order; those behind the last dim are not read.
POLYKV_TARGET inline void load_plane(const uint8_t* plane, uint32_t dims, __m256i* out) {
  if (dims < kTileDims) {
    alignas(32) uint8_t bytes[kTileDims * 4] = {};
    std::memcpy(bytes, plane, size_t{dims} * 4);
    return load_plane(bytes, kTileDims, out);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) out[i] = load_halves(plane + i * 16, plane + 64 + i * 16);
}

/// One group of 8 token quads of V of 3 to 5 bits, 32 dims from `dim` on.
template <uint32_t Bits>
POLYKV_TARGET inline void v_group_levels(const uint8_t* planes, uint32_t dims, uint32_t dim,
                                         const LevelTables<Bits>& tables, uint32_t group,
                                         LevelRows& levels) {
  constexpr uint32_t kLowPlanes = Bits == 3 ? kV3Planes : 4;
  __m256i all[Bits][4];
  for (uint32_t plane = 0; plane < Bits; ++plane)
    load_plane(planes + (size_t{plane} * dims + dim) * 4, dims - dim, all[plane]);
  __m256i out[4];
#pragma GCC unroll 4
  for (uint32_t plane = 0; plane < kLowPlanes; ++plane) {
#pragma GCC unroll 2
    for (uint32_t odd = 0; odd < 2; ++odd) {
      const int quad = static_cast<int>(2 * plane + odd);
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i) {
        const __m256i bytes = all[plane][i];
        const __m256i high = _mm256_slli_epi16(all[Bits - 1][i], 7 - quad);
        out[i] = tables.at(odd == 0 ? low_nibbles(bytes) : high_nibbles(bytes), high, high);
      }
      store_token_quad(out, group * kGroupQuads + 2 * plane + odd, dim, levels);
    }
  }
  if constexpr (Bits == 3) {
    // Quads 6 and 7 have a bit in each plane.
#pragma GCC unroll 2
    for (uint32_t quad = 6; quad < kGroupQuads; ++quad) {
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i) {
        const int shift = quad == 6 ? 3 : 7;
        const auto bit = [&](uint32_t plane, int to, int mask) POLYKV_TARGET {
          return _mm256_and_si256(_mm256_srli_epi16(all[plane][i], shift - to),
                                  _mm256_set1_epi8(static_cast<char>(mask)));
        };
        const __m256i code =
            _mm256_or_si256(_mm256_or_si256(bit(0, 0, 1), bit(1, 1, 2)), bit(2, 2, 4));
        out[i] = tables.at(code, code, code);
      }
      store_token_quad(out, group * kGroupQuads + quad, dim, levels);
    }
  }
}

template <uint32_t Bits>
POLYKV_TARGET void v_levels(const uint8_t* codes, uint32_t dims, LevelRows& levels) {
  for (uint32_t dim = 0; dim < dims; dim += kTileDims) {
    if constexpr (Bits == 8) {
      for (uint32_t quad = 0; quad < kTokenQuads; ++quad) {
        __m256i bytes[4];
        load_plane(codes + (size_t{quad} * dims + dim) * 4, dims - dim, bytes);
        store_token_quad(bytes, quad, dim, levels);
      }
    } else {
      const LevelTables<Bits> tables;
      for (uint32_t group = 0; group < kTokenQuads / kGroupQuads; ++group) {
        v_group_levels<Bits>(codes + size_t{group} * Bits * dims * 4, dims, dim, tables, group,
                             levels);
      }
    }
  }
}

POLYKV_TARGET inline void butterfly(__m256i& a, __m256i& b) {
  const __m256i sum = _mm256_add_epi16(a, b);
  b = _mm256_sub_epi16(a, b);
  a = sum;
}

/// The transform of 32 levels, in 16 bits: dims 0 to 15 and 16 to 31. Each step pairs other dims by
/// interleaving the two vectors; the bytes are put in an order first that makes the last one leave
/// the dims in theirs.
POLYKV_TARGET inline void walsh_hadamard32(__m256i levels, __m256i& low, __m256i& high) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  const __m256i ones = _mm256_set1_epi8(1);
  const __m256i alternating = _mm256_set1_epi16(static_cast<int16_t>(0xff01));
  const __m256i x = _mm256_shuffle_epi8(levels, order);
  const __m256i sums = _mm256_maddubs_epi16(ones, x);
  const __m256i differences = _mm256_maddubs_epi16(ones, _mm256_sign_epi8(x, alternating));
  __m256i a = _mm256_unpacklo_epi16(sums, differences);
  __m256i b = _mm256_unpackhi_epi16(sums, differences);
  butterfly(a, b);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256i next = _mm256_unpacklo_epi32(a, b);
    b = _mm256_unpackhi_epi32(a, b);
    a = next;
    butterfly(a, b);
  }
  low = _mm256_permute2x128_si256(a, b, 0x20);
  high = _mm256_permute2x128_si256(a, b, 0x31);
  butterfly(low, high);
}

/// Of Pairs * 32 dims, with turned signs.
template <uint32_t Pairs>
POLYKV_TARGET void rotate_levels(const int8_t* levels, const int16_t* signs, int16_t* out) {
  __m256i x[2 * Pairs];
#pragma GCC unroll 8
  for (uint32_t i = 0; i < Pairs; ++i)
    walsh_hadamard32(load256(levels + i * kTileDims), x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 3
  for (uint32_t half = 2; half < 2 * Pairs; half *= 2) {
#pragma GCC unroll 16
    for (uint32_t i = 0; i < 2 * Pairs; ++i) {
      if ((i & half) == 0) butterfly(x[i], x[i + half]);
    }
  }
#pragma GCC unroll 16
  for (uint32_t i = 0; i < 2 * Pairs; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * 16),
                        _mm256_sign_epi16(x[i], load256(signs + i * 16)));
  }
}

POLYKV_TARGET void rotate_levels16(const int8_t* levels, const int16_t* signs,
                                          int16_t* out) {
  const __m256i alone =
      _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(levels)));
  __m256i low;
  __m256i high;
  walsh_hadamard32(alone, low, high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_sign_epi16(low, load256(signs)));
}

// As kSigns.
constexpr auto kSigns16 = [] {
  std::array<std::array<int16_t, kMaxHeadDim>, 2> signs{};
  for (uint32_t dim = 0; dim < kMaxHeadDim; ++dim) {
    signs[0][dim] = 1;
    signs[1][dim] = rotation_turns(dim) ? -1 : 1;
  }
  return signs;
}();

using RotateLevels = void (*)(const int8_t* levels, const int16_t* signs, int16_t* out);

/// Of a block of the transform with so many dims.
POLYKV_TARGET inline RotateLevels rotation_of(uint32_t count) {
  switch (count) {
    case 16:
      return rotate_levels16;
    case 32:
      return rotate_levels<1>;
    case 64:
      return rotate_levels<2>;
    case 128:
      return rotate_levels<4>;
    default:
      return rotate_levels<8>;
  }
}

template <Dtype To>
using ElementOf = std::conditional_t<To == Dtype::f32, float, uint16_t>;

POLYKV_TARGET inline __m128i bf16_of(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));  // NaN stays one
  const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
  const __m256i upper = _mm256_srli_epi32(chosen, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

/// Sixteen bytes to where they belong. Streams: past the caches; `out` is aligned to them.
template <bool Streams>
POLYKV_TARGET inline void put_bytes(void* out, __m128i bytes) {
  auto* to = static_cast<__m128i*>(out);
  Streams ? _mm_stream_si128(to, bytes) : _mm_storeu_si128(to, bytes);
}

template <Dtype To, bool Streams>
POLYKV_TARGET inline void put8(ElementOf<To>* out, __m256 values) {
  if constexpr (To == Dtype::f32) {
    put_bytes<Streams>(out, _mm_castps_si128(_mm256_castps256_ps128(values)));
    put_bytes<Streams>(out + 4, _mm_castps_si128(_mm256_extractf128_ps(values, 1)));
  } else if constexpr (To == Dtype::f16) {
    put_bytes<Streams>(out, _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  } else {
    put_bytes<Streams>(out, bf16_of(values));
  }
}

POLYKV_TARGET inline __m256 as_floats(const int16_t* integers) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(integers))));
}
POLYKV_TARGET inline __m256 as_floats(const int8_t* integers) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(integers))));
}

/// count values: integers * scale + means. Both may be read up to seven behind the last.
template <Dtype To, bool Streams, typename Integer>
POLYKV_TARGET inline void put_values(const Integer* integers, uint32_t count, float scale,
                                     const float* means, ElementOf<To>* out) {
  const __m256 scale8 = _mm256_set1_ps(scale);
  uint32_t i = 0;
#pragma GCC unroll 4
  for (; i + 8 <= count; i += 8) {
    put8<To, Streams>(
        out + i, _mm256_fmadd_ps(as_floats(integers + i), scale8, _mm256_loadu_ps(means + i)));
  }
  if (i == count) return;
  ElementOf<To> rest[8];
  put8<To, false>(
      rest, _mm256_fmadd_ps(as_floats(integers + i), scale8, _mm256_loadu_ps(means + i)));
  std::memcpy(out + i, rest, (count - i) * sizeof *rest);
}

template <Dtype To, bool Streams>
POLYKV_TARGET void put_rows(const BlockCodes& block, LevelRows& levels, const RowsTarget& target) {
  alignas(32) float means[kMaxHeadDim + 8];
  std::memset(means, 0, (block.dims + 8) * sizeof *means);
  if (block.means != nullptr) std::memcpy(means, block.means, block.dims * sizeof *means);
  const auto row = [&](uint32_t token) {
    return static_cast<ElementOf<To>*>(target.data) +
           static_cast<int64_t>(token - target.low) * target.stride;
  };
  const auto prefetch_next = [&](uint32_t token) POLYKV_TARGET {
    const size_t row_bytes = size_t{block.dims} * block.rule.bits / 8;
    const auto* next = reinterpret_cast<const char*>(block.next + token * row_bytes);
    _mm_prefetch(next, _MM_HINT_T0);
    _mm_prefetch(next + row_bytes - 1, _MM_HINT_T0);
  };
  if (!block.rule.rotated) {
    for (uint32_t token = target.low; token < target.high; ++token) {
      prefetch_next(token);
      put_values<To, Streams>(levels.row(token), block.dims, block.gains[token], means, row(token));
    }
    return;
  }
  const int16_t* signs = kSigns16[block.rule.turns_signs ? 1 : 0].data();
  for_each_rotation_block(block.dims, [&](uint32_t first, uint32_t count) POLYKV_TARGET {
    const RotateLevels rotate = rotation_of(count);
    const float norm = 1 / std::sqrt(static_cast<float>(count));
    alignas(32) int16_t rotated[kMostFusedDims];
    for (uint32_t token = target.low; token < target.high; ++token) {
      prefetch_next(token);
      rotate(levels.row(token) + first, signs + first, rotated);
      put_values<To, Streams>(rotated, count, block.gains[token] * norm, means + first,
                              row(token) + first);
    }
  });
}

POLYKV_TARGET inline void block_levels(const BlockCodes& block, LevelRows& levels) {
  const auto unpack = [&]() -> void (*)(const uint8_t*, uint32_t, LevelRows&) {
    switch (block.rule.bits) {
      case 3:
        return v_levels<3>;
      case 4:
        return block.is_k ? k_levels<4> : v_levels<4>;
      case 5:
        return block.is_k ? k_levels<5> : v_levels<5>;
      case 6:
        return k_levels<6>;
      default:
        return block.is_k ? k_levels<8> : v_levels<8>;
    }
  }();
  unpack(block.codes, block.dims, levels);
}

template <Dtype To>
POLYKV_TARGET inline void put_rows(const BlockCodes& block, LevelRows& levels,
                                   const RowsTarget& target) {
  if (!target.streams) return put_rows<To, false>(block, levels, target);
  put_rows<To, true>(block, levels, target);
  _mm_sfence();
}

POLYKV_TARGET void decode_block_rows(const BlockCodes& block, const RowsTarget& target) {
  LevelRows levels(block.dims);
  block_levels(block, levels);
  switch (target.dtype) {
    case Dtype::f32:
      return put_rows<Dtype::f32>(block, levels, target);
    case Dtype::f16:
      return put_rows<Dtype::f16>(block, levels, target);
    case Dtype::bf16:
      return put_rows<Dtype::bf16>(block, levels, target);
  }
}
