// AVX-512: a block's codes to levels, one byte each. A step takes the 32 tokens whose codes share
// lines: two groups of 16 of K, eight token quads of V. Dims are a multiple of 16.
//
// Moving bytes costs less before codes are looked up, where a byte has two of them: so lines are
// brought in the rows' order as they are (lanes below are a byte's index in 64, highest bit first;
// d5 to d0 are the bits of a dim's number in its tile, t1 and t0 a token's in four):
//
//   K   d5 d4 t1 t0 d1 d0   loads of 16 bytes from four pieces, by masks instead of shuffles
//       d5 d4 t1 d3 d1 d0   a line's d3 for t0; the nibbles of a byte are d2
//       d5 d4 d2 d3 d1 d0   of one token, after the look-up
//   V   d3 d2 d1 d0 t1 t0   as they lie
//       t1 t0 d2 d3 d1 d0   one vpermb
//       d5 d4 d2 d3 d1 d0   of one token, by exchanging quarters of four vectors
//
// Per 64 levels: K5 0.5 shuffles of a line's bytes, 1 vpmultishiftqb, which brings upper bits in
// place, 1 look-up, 1 shuffle of levels; V4 1.5 and 1 look-up. A ternary operation joins upper bits
// and nibbles.

constexpr uint32_t kTileDims = 64;
constexpr uint32_t kStepTokens = 32;
constexpr uint32_t kSteps = kBlockTokens / kStepTokens;
static_assert(kStepTokens == kPieceTokens && kStepTokens == 4 * kGroupQuads);

/// The dim whose level is byte `byte` of a tile of a rotated row. Others are in order.
constexpr uint32_t tile_dim(uint32_t byte) {
  return (byte & 0x33U) | (byte & 4U) << 1 | (byte & 8U) >> 1;
}

/// [32 tokens, dims], rows of whole tiles. What lies behind a row's last dim is of no use. Rotated
/// levels are stored + kKeyBias, int8 as they are.
struct LevelRows {
  explicit LevelRows(uint32_t dims) : stride((dims + kTileDims - 1) / kTileDims * kTileDims) {}
  uint8_t* row(uint32_t i) { return bytes + size_t{i} * stride; }

  uint32_t stride;
  alignas(64) uint8_t bytes[size_t{kStepTokens} * kMaxHeadDim];
};
static_assert(kMaxHeadDim % kTileDims == 0);

/// The token of a step's row i.
inline uint32_t step_token(bool is_k, uint32_t step, uint32_t i) {
  return is_k ? step * kStepTokens + i : quad_token(kGroupQuads * step + i / 4, i % 4);
}

POLYKV_INLINE __m512i load512(const void* bytes) {
  return _mm512_loadu_si512(bytes);
}
POLYKV_INLINE __m128i load128(const void* bytes) {
  return _mm_loadu_si128(static_cast<const __m128i*>(bytes));
}
POLYKV_INLINE __m512i splat(int byte) {
  return _mm512_set1_epi8(static_cast<char>(byte));
}

constexpr int kFirstChooses = 0xca;  // of a ternary operation: a ? b : c, bit by bit

/// 2^Bits levels, repeated: neighbours' bits above a code do no harm.
template <uint32_t Bits>
struct LevelTable {
  __m512i levels;

  POLYKV_INLINE LevelTable() {
    static constexpr auto kBytes = [] {
      std::array<uint8_t, 64> bytes{};
      for (uint32_t code = 0; code < bytes.size(); ++code) {
        const Codebook& book = codebook(Bits);
        bytes[code] = static_cast<uint8_t>(book.levels[code % book.size] + kKeyBias);
      }
      return bytes;
    }();
    levels = load512(kBytes.data());
  }
  POLYKV_INLINE __m512i at(__m512i codes) const { return _mm512_permutexvar_epi8(codes, levels); }
  /// Of codes whose low four bits are those of `nibbles`, the others those of `upper`.
  POLYKV_INLINE __m512i at(__m512i nibbles, __m512i upper) const {
    return at(_mm512_ternarylogic_epi32(splat(15), nibbles, upper, kFirstChooses));
  }
};
POLYKV_INLINE __m512i high_nibbles(__m512i bytes) {
  return _mm512_srli_epi16(bytes, 4);
}

/// 16 bytes from each of four places.
POLYKV_INLINE __m512i load_quarters(const uint8_t* const* from, size_t at) {
  __m512i x = _mm512_broadcast_i32x4(load128(from[0] + at));
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, load128(from[1] + at));
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, load128(from[2] + at));
  return _mm512_mask_broadcast_i32x4(x, 0xf000, load128(from[3] + at));
}

/// For vpmultishiftqb: the bits above the fourth of dims d3, d1, d0 of a token with these d2 and
/// t0, to bit 4 of their bytes, from a line that has 4 dims of each of two tokens in 8 bytes.
template <uint32_t Bits>
constexpr int64_t upper_bits(uint32_t group, uint32_t t0, uint32_t d2) {
  uint64_t places = 0;
  for (uint32_t byte = 0; byte < 8; ++byte) {
    const uint32_t quad = byte / 4 * 2 + d2;
    const uint32_t bit = Bits == 6 ? 2 * quad : 4 * group + quad;
    const uint32_t from = (4 * t0 + byte % 4) * 8 + bit;
    places |= uint64_t{(from + 64 - 4) % 64} << (8 * byte);
  }
  return static_cast<int64_t>(places);
}

/// 64 dims of four tokens, t and t + 2 of them, from one vector of nibbles: rows[0] and rows[2].
template <uint32_t Bits>
POLYKV_INLINE void put_token_pair(__m512i nibbles, __m512i upper, uint32_t group, uint32_t t0,
                                  const LevelTable<Bits>& table, uint8_t* row, size_t stride) {
  __m512i levels[2];
#pragma GCC unroll 2
  for (uint32_t d2 = 0; d2 < 2; ++d2) {
    const __m512i low = d2 == 0 ? nibbles : high_nibbles(nibbles);
    if constexpr (Bits == 4) {
      levels[d2] = table.at(low);
    } else {
      const __m512i places = _mm512_set1_epi64(upper_bits<Bits>(group, t0, d2));
      levels[d2] = table.at(low, _mm512_multishift_epi64_epi8(places, upper));
    }
  }
  _mm512_store_si512(row, _mm512_unpacklo_epi64(levels[0], levels[1]));
  _mm512_store_si512(row + 2 * stride, _mm512_unpackhi_epi64(levels[0], levels[1]));
}

/// A tile of K of 4 to 6 bits: four pieces, which may be the same one.
template <uint32_t Bits>
POLYKV_INLINE void k_tile(const uint8_t* const* pieces, uint8_t* rows, size_t stride) {
  const LevelTable<Bits> table;
  constexpr uint32_t kOdd = 0xaaaa;  // of 16 numbers of 32 bits
#pragma GCC unroll 1
  for (uint32_t four = 0; four < 4; ++four) {
    __m512i upper = _mm512_setzero_si512();
    if (Bits == 5) upper = load_quarters(pieces, kPieceLowLines * kPieceLineBytes + four * 16);
#pragma GCC unroll 2
    for (uint32_t group = 0; group < 2; ++group) {
      const size_t at = group * 2 * kPieceLineBytes + four * 16;
      const __m512i low = load_quarters(pieces, at);
      const __m512i high = load_quarters(pieces, at + kPieceLineBytes);
      if (Bits == 6)
        upper = load_quarters(pieces, (kPieceLowLines + group) * kPieceLineBytes + four * 16);
      const __m512i even = _mm512_mask_shuffle_epi32(low, kOdd, high, _MM_PERM_CCAA);
      const __m512i odd = _mm512_mask_shuffle_epi32(high, kOdd >> 1, low, _MM_PERM_DDBB);
      uint8_t* row = rows + (group * 16 + four * 4) * stride;
      put_token_pair<Bits>(even, upper, group, 0, table, row, stride);
      put_token_pair<Bits>(odd, upper, group, 1, table, row + stride, stride);
    }
  }
}

/// A tile of K8: quads[i] are the dim quads i, i + 4, i + 8, i + 12, which may be the same one.
POLYKV_INLINE void k8_tile(const uint8_t* const (*quads)[4], uint8_t* rows, size_t stride) {
#pragma GCC unroll 1
  for (uint32_t four = 0; four < kStepTokens / 4; ++four) {
    __m512i x[4];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i)
      x[i] = _mm512_xor_si512(load_quarters(quads[i], four * 16), splat(kKeyBias));
    uint8_t* row = rows + four * 4 * stride;
#pragma GCC unroll 2
    for (uint32_t half = 0; half < 2; ++half) {
      const auto pair = [&](uint32_t i) POLYKV_TARGET {
        return half == 0 ? _mm512_unpacklo_epi32(x[i], x[i + 1])
                         : _mm512_unpackhi_epi32(x[i], x[i + 1]);
      };
      const __m512i pairs[2] = {pair(0), pair(2)};
      _mm512_store_si512(row, _mm512_unpacklo_epi64(pairs[0], pairs[1]));
      _mm512_store_si512(row + stride, _mm512_unpackhi_epi64(pairs[0], pairs[1]));
      row += 2 * stride;
    }
  }
}

/// K of 4 to 6 bits, or of 8.
template <uint32_t Bits>
POLYKV_TARGET void k_levels(const uint8_t* codes, uint32_t dims, uint32_t step, LevelRows& levels) {
  for (uint32_t dim = 0; dim < dims; dim += kTileDims) {
    // Of a last tile that is not whole its first 16 dims stand in for those behind the last.
    const auto part = [&](uint32_t i) { return dim + (dim + i * 16 < dims ? i * 16 : 0); };
    if constexpr (Bits == 8) {
      const uint8_t* quads[4][4];
      for (uint32_t i = 0; i < 4; ++i) {
        for (uint32_t j = 0; j < 4; ++j)
          quads[i][j] = codes + k8_offset(step * kStepTokens, part(j) + 4 * i);
      }
      k8_tile(quads, levels.row(0) + dim, levels.stride);
    } else {
      const uint8_t* pieces[4];
      for (uint32_t i = 0; i < 4; ++i)
        pieces[i] = codes + k_line_offset(step * kStepTokens, part(i), dims, Bits, 0);
      k_tile<Bits>(pieces, levels.row(0) + dim, levels.stride);
    }
  }
}

/// A plane's bytes of 64 dims to one vector a token of its quads. in: 16 dims of four tokens each.
template <bool IsRotated>
POLYKV_INLINE void by_token(const uint8_t* const* in, __m512i* tokens) {
  static constexpr auto kOrder = [] {
    std::array<uint8_t, 64> order{};
    for (uint32_t i = 0; i < order.size(); ++i) {
      const uint32_t dim = IsRotated ? tile_dim(i % 16) : i % 16;
      order[i] = static_cast<uint8_t>(dim * 4 + i / 16);
    }
    return order;
  }();
  const __m512i order = load512(kOrder.data());
  __m512i x[4];
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i) x[i] = _mm512_permutexvar_epi8(order, load512(in[i]));
  const __m512i low[2] = {_mm512_shuffle_i32x4(x[0], x[1], 0x44),
                          _mm512_shuffle_i32x4(x[2], x[3], 0x44)};
  const __m512i high[2] = {_mm512_shuffle_i32x4(x[0], x[1], 0xee),
                           _mm512_shuffle_i32x4(x[2], x[3], 0xee)};
  tokens[0] = _mm512_shuffle_i32x4(low[0], low[1], 0x88);
  tokens[1] = _mm512_shuffle_i32x4(low[0], low[1], 0xdd);
  tokens[2] = _mm512_shuffle_i32x4(high[0], high[1], 0x88);
  tokens[3] = _mm512_shuffle_i32x4(high[0], high[1], 0xdd);
}

/// Bit `from` of each byte to its bit `to`, among other bits.
POLYKV_INLINE __m512i move_bit(__m512i x, uint32_t from, uint32_t to) {
  return from < to ? _mm512_slli_epi16(x, to - from) : _mm512_srli_epi16(x, from - to);
}

/// A tile of a group of V3 to V5. plane(p, tokens) gives plane p by token.
template <uint32_t Bits, typename Plane>
POLYKV_INLINE void v_tile(Plane plane, uint8_t* rows, size_t stride) {
  const LevelTable<Bits> table;
  __m512i planes[Bits == 3 ? 3 : 1][4];
  if constexpr (Bits == 5) plane(4, planes[0]);
#pragma GCC unroll 4
  for (uint32_t pair = 0; pair < (Bits == 3 ? 3 : 4); ++pair) {
    __m512i nibbles[4];
    plane(pair, nibbles);
#pragma GCC unroll 4
    for (uint32_t lane = 0; lane < 4; ++lane) {
#pragma GCC unroll 2
      for (uint32_t odd = 0; odd < 2; ++odd) {
        const uint32_t quad = 2 * pair + odd;
        const __m512i low = odd == 0 ? nibbles[lane] : high_nibbles(nibbles[lane]);
        __m512i levels;
        if constexpr (Bits == 5) levels = table.at(low, move_bit(planes[0][lane], quad, 4));
        if constexpr (Bits != 5) levels = table.at(low);
        _mm512_store_si512(rows + (quad * 4 + lane) * stride, levels);
      }
      if constexpr (Bits == 3) planes[pair][lane] = nibbles[lane];
    }
  }
  if constexpr (Bits == 3) {
#pragma GCC unroll 4
    for (uint32_t lane = 0; lane < 4; ++lane) {
#pragma GCC unroll 2
      for (uint32_t quad = 6; quad < 8; ++quad) {
        const uint32_t bit = quad == 6 ? 3 : 7;
        const __m512i two =
            _mm512_ternarylogic_epi32(splat(1), move_bit(planes[0][lane], bit, 0),
                                      move_bit(planes[1][lane], bit, 1), kFirstChooses);
        const __m512i code = _mm512_ternarylogic_epi32(
            splat(3), two, move_bit(planes[2][lane], bit, 2), kFirstChooses);
        _mm512_store_si512(rows + (quad * 4 + lane) * stride, table.at(code));
      }
    }
  }
}

/// V of 3 to 5 bits, or of 8.
template <uint32_t Bits>
POLYKV_TARGET void v_levels(const uint8_t* codes, uint32_t dims, uint32_t step, LevelRows& levels) {
  for (uint32_t dim = 0; dim < dims; dim += kTileDims) {
    const auto plane = [&](const uint8_t* at, auto put) POLYKV_TARGET {
      const uint8_t* parts[4];
      for (uint32_t i = 0; i < 4; ++i)
        parts[i] = at + (dim + (dim + i * 16 < dims ? i * 16 : 0)) * 4;
      put(parts);
    };
    uint8_t* rows = levels.row(0) + dim;
    if constexpr (Bits == 8) {
      for (uint32_t quad = 0; quad < kGroupQuads; ++quad) {
        plane(codes + size_t{step * kGroupQuads + quad} * dims * 4, [&](auto parts) POLYKV_TARGET {
          __m512i tokens[4];
          by_token<false>(parts, tokens);
          for (uint32_t lane = 0; lane < 4; ++lane)
            _mm512_store_si512(rows + (quad * 4 + lane) * levels.stride, tokens[lane]);
        });
      }
    } else {
      const uint8_t* group = codes + size_t{step} * Bits * dims * 4;
      v_tile<Bits>(
          [&](uint32_t p, __m512i* tokens) POLYKV_TARGET {
            plane(group + size_t{p} * dims * 4,
                  [&](auto parts) POLYKV_TARGET { by_token<true>(parts, tokens); });
          },
          rows, levels.stride);
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
