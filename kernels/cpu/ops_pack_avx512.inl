// AVX-512: codes of a byte each to the lines of K and the planes of V, 64 dims at a time; the way
// back of ops_levels_avx512.inl.

/// The bits of `chosen` that `mask` has in each byte, the others of `x`.
POLYKV_INLINE __m512i put_bits(__m512i x, __m512i chosen, uint32_t mask) {
  return _mm512_ternarylogic_epi32(splat(static_cast<int>(mask)), chosen, x, kFirstChooses);
}
POLYKV_INLINE __m512i join_nibbles(__m512i low, __m512i high) {
  return put_bits(_mm512_slli_epi16(high, 4), low, 15);
}

/// Up to 64 dims of a row; nothing behind the last one is read.
struct PackedTile {
  uint32_t dims;

  POLYKV_INLINE __m512i load(const uint8_t* codes) const {
    const uint32_t words = dims / 4;
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << words) - 1), codes);
  }
  /// 16 bytes for each 16 dims, `step` bytes apart.
  POLYKV_INLINE void store(__m512i x, uint8_t* to, size_t step) const {
    const auto put = [&](__m128i quarter, size_t i) POLYKV_TARGET {
      if (i * 16 < dims) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * step), quarter);
    };
    put(_mm512_castsi512_si128(x), 0);
    put(_mm512_extracti32x4_epi32(x, 1), 1);
    put(_mm512_extracti32x4_epi32(x, 2), 2);
    put(_mm512_extracti32x4_epi32(x, 3), 3);
  }
};

/// quads[i]: dim quad i of 16 dims, [16 dims][4 tokens][4 dims].
POLYKV_INLINE void load_dim_quads(PackedTile tile, const uint8_t* codes, size_t stride,
                                  __m512i* quads) {
  __m512i x[4];
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i) x[i] = tile.load(codes + i * stride);
  const __m512i low[2] = {_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpacklo_epi32(x[2], x[3])};
  const __m512i high[2] = {_mm512_unpackhi_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[2], x[3])};
  quads[0] = _mm512_unpacklo_epi64(low[0], low[1]);
  quads[1] = _mm512_unpackhi_epi64(low[0], low[1]);
  quads[2] = _mm512_unpacklo_epi64(high[0], high[1]);
  quads[3] = _mm512_unpackhi_epi64(high[0], high[1]);
}

/// Four pieces or fewer, 32 tokens.
template <uint32_t Bits>
POLYKV_INLINE void k_pack_tile(PackedTile tile, const uint8_t* codes, size_t stride,
                               uint8_t* pieces) {
  constexpr size_t kPieceBytes = Bits * kPieceLineBytes;
#pragma GCC unroll 1
  for (uint32_t four = 0; four < 4; ++four) {
    uint8_t* to = pieces + four * 16;
    __m512i upper = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (uint32_t group = 0; group < 2; ++group) {
      __m512i quads[4];
      load_dim_quads(tile, codes + (group * 16 + four * 4) * stride, stride, quads);
      uint8_t* low = to + group * 2 * kPieceLineBytes;
      tile.store(join_nibbles(quads[0], quads[1]), low, kPieceBytes);
      tile.store(join_nibbles(quads[2], quads[3]), low + kPieceLineBytes, kPieceBytes);
      if constexpr (Bits == 4) continue;
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t bit = Bits == 6 ? 2 * i : 4 * group + i;
        upper = put_bits(upper, move_bit(quads[i], 4, bit), (Bits == 6 ? 3U : 1U) << bit);
      }
      if (Bits == 6 || group == 1)
        tile.store(upper, to + (kPieceLowLines + (Bits == 6 ? group : 0)) * kPieceLineBytes,
                   kPieceBytes);
    }
  }
}

template <uint32_t Bits>
POLYKV_TARGET void k_pack_bits(const uint8_t* codes, uint32_t dims, uint8_t* pieces) {
  for (uint32_t token = 0; token < kBlockTokens; token += kPieceTokens) {
    for (uint32_t dim = 0; dim < dims; dim += kTileDims) {
      k_pack_tile<Bits>({std::min(dims - dim, kTileDims)}, codes + size_t{token} * dims + dim, dims,
                        pieces + k_line_offset(token, dim, dims, Bits, 0));
    }
  }
}

POLYKV_TARGET void k_pack_pieces(const uint8_t* codes, uint32_t dims, uint32_t bits,
                                 uint8_t* pieces) {
  if (bits == 4) return k_pack_bits<4>(codes, dims, pieces);
  if (bits == 5) return k_pack_bits<5>(codes, dims, pieces);
  k_pack_bits<6>(codes, dims, pieces);
}

/// dims[i]: dims 4 i to 4 i + 3 of 16, [16 dims][4 dims][4 tokens of a quad].
POLYKV_INLINE void load_token_quad(PackedTile tile, const uint8_t* codes, size_t stride,
                                   uint32_t quad, __m512i* dims) {
  __m512i x[4];
#pragma GCC unroll 4
  for (uint32_t lane = 0; lane < 4; ++lane)
    x[lane] = tile.load(codes + quad_token(quad, lane) * stride);
  const __m512i low[2] = {_mm512_unpacklo_epi8(x[0], x[1]), _mm512_unpacklo_epi8(x[2], x[3])};
  const __m512i high[2] = {_mm512_unpackhi_epi8(x[0], x[1]), _mm512_unpackhi_epi8(x[2], x[3])};
  dims[0] = _mm512_unpacklo_epi16(low[0], low[1]);
  dims[1] = _mm512_unpackhi_epi16(low[0], low[1]);
  dims[2] = _mm512_unpacklo_epi16(high[0], high[1]);
  dims[3] = _mm512_unpackhi_epi16(high[0], high[1]);
}

/// A tile of a group of eight token quads, from quad `first` on.
template <uint32_t Bits>
POLYKV_INLINE void v_pack_tile(PackedTile tile, const uint8_t* codes, size_t stride, uint32_t first,
                               uint8_t* planes) {
  constexpr uint32_t kPairs = Bits == 3 ? kV3Planes : 4;
  const size_t plane_bytes = stride * 4;
  __m512i upper[4] = {};  // V5's fifth bits; V3's last two quads
  __m512i last[4] = {};
  if constexpr (Bits == 3) {
    load_token_quad(tile, codes, stride, first + 6, upper);
    load_token_quad(tile, codes, stride, first + 7, last);
  }
#pragma GCC unroll 4
  for (uint32_t pair = 0; pair < kPairs; ++pair) {
    __m512i even[4];
    __m512i odd[4];
    load_token_quad(tile, codes, stride, first + 2 * pair, even);
    load_token_quad(tile, codes, stride, first + 2 * pair + 1, odd);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
      __m512i bytes = join_nibbles(even[i], odd[i]);
      if constexpr (Bits == 3) {
        bytes = put_bits(bytes, move_bit(upper[i], pair, 3), 1U << 3);
        bytes = put_bits(bytes, move_bit(last[i], pair, 7), 1U << 7);
      }
      if constexpr (Bits == 5) {
        upper[i] = put_bits(upper[i], move_bit(even[i], 4, 2 * pair), 1U << (2 * pair));
        upper[i] = put_bits(upper[i], move_bit(odd[i], 4, 2 * pair + 1), 2U << (2 * pair));
      }
      tile.store(bytes, planes + pair * plane_bytes + i * 16, 64);
    }
  }
  if constexpr (Bits == 5) {
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) tile.store(upper[i], planes + 4 * plane_bytes + i * 16, 64);
  }
}

template <uint32_t Bits>
POLYKV_TARGET void v_pack_bits(const uint8_t* codes, uint32_t dims, uint8_t* planes) {
  for (uint32_t first = 0; first < kTokenQuads; first += kGroupQuads) {
    uint8_t* group = planes + size_t{first / kGroupQuads} * Bits * dims * 4;
    for (uint32_t dim = 0; dim < dims; dim += kTileDims) {
      v_pack_tile<Bits>({std::min(dims - dim, kTileDims)}, codes + dim, dims, first,
                        group + size_t{dim} * 4);
    }
  }
}

POLYKV_TARGET void v_pack_planes(const uint8_t* codes, uint32_t dims, uint32_t bits,
                                 uint8_t* planes) {
  if (bits == 3) return v_pack_bits<3>(codes, dims, planes);
  if (bits == 4) return v_pack_bits<4>(codes, dims, planes);
  v_pack_bits<5>(codes, dims, planes);
}
