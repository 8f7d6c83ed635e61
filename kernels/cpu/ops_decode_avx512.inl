// AVX-512 with VBMI: codes to rows of any dtype, 32 tokens at a time (ops_levels_avx512.inl), then
// a row's tiles of 64 dims.
//
// As with AVX2 the transform is exact in 16 bits (kMostFusedDims). It needs each dim's bit once in
// another vector instead of another lane of one. Lanes of 16 bits, highest bit first, and the bit
// that is in the other vector (d5 to d0: of a dim's number in its tile; d7, d6 are in others):
//
//   d5 d4 d2 d3 d1 | d0   vpmaddubsw: sums and differences of neighbouring bytes
//   d0 d4 d2 d3 d1 | d5   vshufi32x4
//   d0 d4 d3 d1 d5 | d2   vpunpcklwd, vpunpckhwd
//   d0 d4 d1 d2 d5 | d3   vpunpckldq, vpunpckhdq
//   d0 d4 d2 d3 d5 | d1   the same
//   d3 d2 d1 d0 d5 | d4   vpermt2d: even numbers are 16 dims in order, odd ones the next but one 16
//
// so that numbers of 32 bits, and halves after vcvtps2ph, are in their order without a further
// shuffle. Where a transform is of 32 or 16 dims, masks leave out the steps of d5 and d4.
//
// For 128 rotated dims to fp16, operations on vectors of 64 bytes (Intel has two ports for them,
// the second alone shuffles):
//
//                                        both ports   second alone
//   levels of K5 (V4)                      7 (1)        7 (5)
//   first step, without its bias           6
//   butterflies                           24
//   shuffles between them                               20
//   signs, by masks                        4
//   widening, conversion, gain and mean   24
//   vcvtps2ph, half of it each             8            8
//   stores past the caches: joining                     4
//   together                              73 (67)      39 (37)
//
// so at best 56 (52) cycles where two of them begin in a cycle.
#include "kernels/cpu/ops_levels_avx512.inl"

template <Dtype To>
using ElementOf = std::conditional_t<To == Dtype::f32, float, uint16_t>;

/// Which of a tile's dims are transformed together: lanes, even and odd, as above, in which a step
/// is done.
struct TileKind {
  __mmask32 d5;
  __mmask32 d4;
};
constexpr TileKind kWholeTile = {0xffffffff, 0xffffffff};
/// 32 dims and 16, or one of them.
constexpr TileKind tail_kind(uint32_t dims) {
  return {0, (dims & 32U) != 0 ? 0x55555555U : 0};
}

/// Integers of 16 bits of a tile: dims 0 to 15 in even and 32 to 47 in odd lanes, and the others.
struct Tile {
  __m512i first;
  __m512i second;
};

template <bool IsWhole>
POLYKV_INLINE void butterfly(Tile& x, __mmask32 lanes = 0xffffffff) {
  const __m512i a = x.first;
  if constexpr (IsWhole) {
    x.first = _mm512_add_epi16(a, x.second);
    x.second = _mm512_sub_epi16(a, x.second);
  } else {
    x.first = _mm512_mask_add_epi16(a, lanes, a, x.second);
    x.second = _mm512_mask_sub_epi16(x.second, lanes, a, x.second);
  }
}

/// For vpermt2d: the numbers of 32 bits d3 d2 d1 d0 where they are before the last step.
constexpr auto kLastStep = [] {
  std::array<std::array<uint32_t, 16>, 2> from{};
  for (uint32_t d4 = 0; d4 < 2; ++d4) {
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t d0 = i & 1;
      const uint32_t d1 = i >> 1 & 1;
      const uint32_t d2 = i >> 2 & 1;
      const uint32_t d3 = i >> 3;
      from[d4][i] = d1 * 16 + d0 * 8 + d4 * 4 + d2 * 2 + d3;
    }
  }
  return from;
}();

/// The transform of a tile's levels.
template <bool IsWhole>
POLYKV_INLINE Tile walsh_hadamard_tile(__m512i levels, TileKind kind) {
  const __m512i ones = _mm512_set1_epi16(0x0101);
  const __m512i alternating = _mm512_set1_epi16(static_cast<int16_t>(0xff01));
  const __m512i bias = _mm512_set1_epi16(2 * kKeyBias);  // differences have none
  Tile x{_mm512_sub_epi16(_mm512_maddubs_epi16(levels, ones), bias),
         _mm512_maddubs_epi16(levels, alternating)};
  x = {_mm512_shuffle_i32x4(x.first, x.second, 0x44),
       _mm512_shuffle_i32x4(x.first, x.second, 0xee)};
  butterfly<IsWhole>(x, kind.d5);
  x = {_mm512_unpacklo_epi16(x.first, x.second), _mm512_unpackhi_epi16(x.first, x.second)};
  butterfly<true>(x);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    x = {_mm512_unpacklo_epi32(x.first, x.second), _mm512_unpackhi_epi32(x.first, x.second)};
    butterfly<true>(x);
  }
  x = {_mm512_permutex2var_epi32(x.first, load512(kLastStep[0].data()), x.second),
       _mm512_permutex2var_epi32(x.first, load512(kLastStep[1].data()), x.second)};
  butterfly<IsWhole>(x, kind.d4);
  return x;
}

// Lanes of a tile whose signs turn, of both vectors; without turned signs, and with them.
constexpr auto kTurnedLanes = [] {
  std::array<std::array<std::array<uint32_t, 2>, kMaxHeadDim / kTileDims>, 2> turned{};
  for (uint32_t dim = 0; dim < kMaxHeadDim; ++dim) {
    const uint32_t lane = dim % 16 * 2 + dim % 64 / 32;
    turned[1][dim / kTileDims][dim % 32 / 16] |= uint32_t{rotation_turns(dim)} << lane;
  }
  return turned;
}();

POLYKV_INLINE __m256i bf16_of(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i quiet =
      _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));  // NaN stays one
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
}

template <Dtype To>
POLYKV_INLINE __m256i half_of(__m512 values) {
  if constexpr (To == Dtype::bf16) return bf16_of(values);
  return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
}

/// Sixteen integers times the gain, plus the means.
POLYKV_INLINE __m512 value_of(__m512i numbers, float gain, const float* means) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(numbers), _mm512_set1_ps(gain), _mm512_loadu_ps(means));
}

/// Sixteen values. Streams: past the caches; `out` is aligned to their bytes.
template <Dtype To, bool Streams>
POLYKV_INLINE void put16(__m512 values, ElementOf<To>* out) {
  if constexpr (To == Dtype::f32) {
    const __m512i bits = _mm512_castps_si512(values);
    Streams ? _mm512_stream_si512(reinterpret_cast<__m512i*>(out), bits)
            : _mm512_storeu_si512(out, bits);
  } else {
    auto* to = reinterpret_cast<__m256i*>(out);
    Streams ? _mm256_stream_si256(to, half_of<To>(values))
            : _mm256_storeu_si256(to, half_of<To>(values));
  }
}
/// 32 values: a whole line of the caches where that matters.
template <Dtype To, bool Streams>
POLYKV_INLINE void put32(__m512 low, __m512 high, ElementOf<To>* out) {
  if constexpr (To != Dtype::f32 && Streams) {
    _mm512_stream_si512(
        reinterpret_cast<__m512i*>(out),
        _mm512_inserti64x4(_mm512_castsi256_si512(half_of<To>(low)), half_of<To>(high), 1));
  } else {
    put16<To, Streams>(low, out);
    put16<To, Streams>(high, out + 16);
  }
}

constexpr float kUpperHalf = 0x1p-16F;  // takes back that an integer is in the upper 16 bits

/// Where the levels and values of a step's rows are, from some dim on.
struct TileRow {
  const uint8_t* levels;
  void* out;
  float gain;
};

/// `Tiles` tiles that are transformed as a whole.
template <Dtype To, bool Streams, uint32_t Tiles>
POLYKV_INLINE void put_tiles(const TileRow& row,
                             const std::array<std::array<uint32_t, 2>, Tiles>& turned,
                             const float* means) {
  Tile x[Tiles];
#pragma GCC unroll 4
  for (uint32_t i = 0; i < Tiles; ++i)
    x[i] = walsh_hadamard_tile<true>(load512(row.levels + i * kTileDims), kWholeTile);
#pragma GCC unroll 2
  for (uint32_t half = 1; half < Tiles; half *= 2) {
#pragma GCC unroll 4
    for (uint32_t i = 0; i < Tiles; ++i) {
      if ((i & half) != 0) continue;
      Tile first{x[i].first, x[i + half].first};
      Tile second{x[i].second, x[i + half].second};
      butterfly<true>(first);
      butterfly<true>(second);
      x[i] = {first.first, second.first};
      x[i + half] = {first.second, second.second};
    }
  }
  const float norm = 1 / std::sqrt(static_cast<float>(Tiles * kTileDims));
  const float gain = row.gain * norm * kUpperHalf;
  auto* out = static_cast<ElementOf<To>*>(row.out);
  const __m512i zero = _mm512_setzero_si512();
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
#pragma GCC unroll 4
  for (uint32_t i = 0; i < Tiles; ++i) {
    const __m512i first = _mm512_mask_sub_epi16(x[i].first, turned[i][0], zero, x[i].first);
    const __m512i second = _mm512_mask_sub_epi16(x[i].second, turned[i][1], zero, x[i].second);
    const auto value = [&](__m512i numbers, uint32_t dim) POLYKV_TARGET {
      return value_of(numbers, gain, means + i * kTileDims + dim);
    };
    put32<To, Streams>(value(_mm512_slli_epi32(first, 16), 0),
                       value(_mm512_slli_epi32(second, 16), 16), out + i * kTileDims);
    put32<To, Streams>(value(_mm512_and_si512(first, upper), 32),
                       value(_mm512_and_si512(second, upper), 48), out + i * kTileDims + 32);
  }
}

/// The last 16, 32 or 48 dims of a row: transforms of 32 and 16.
template <Dtype To, bool Streams>
POLYKV_INLINE void put_tail(const TileRow& row, uint32_t dims, std::array<uint32_t, 2> turned,
                            const float* means) {
  const Tile x = walsh_hadamard_tile<false>(load512(row.levels), tail_kind(dims));
  const __m512i zero = _mm512_setzero_si512();
  const __m512i first = _mm512_mask_sub_epi16(x.first, turned[0], zero, x.first);
  const __m512i second = _mm512_mask_sub_epi16(x.second, turned[1], zero, x.second);
  const float gains[2] = {row.gain * (1 / std::sqrt(32.0F)) * kUpperHalf,
                          row.gain * (1 / std::sqrt(16.0F)) * kUpperHalf};
  auto* out = static_cast<ElementOf<To>*>(row.out);
  put16<To, Streams>(value_of(_mm512_slli_epi32(first, 16), gains[dims == 16 ? 1 : 0], means), out);
  if (dims == 16) return;
  put16<To, Streams>(value_of(_mm512_slli_epi32(second, 16), gains[0], means + 16), out + 16);
  if (dims == 32) return;
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  put16<To, Streams>(value_of(_mm512_and_si512(first, upper), gains[1], means + 32), out + 32);
}

/// Levels as they are, which are int8.
template <Dtype To, bool Streams>
POLYKV_INLINE void put_levels(const TileRow& row, uint32_t dims, const float* means) {
  auto* out = static_cast<ElementOf<To>*>(row.out);
  const auto value = [&](uint32_t dim) POLYKV_TARGET {
    return value_of(_mm512_cvtepi8_epi32(load128(row.levels + dim)), row.gain, means + dim);
  };
  uint32_t dim = 0;
  for (; dim + 32 <= dims; dim += 32) put32<To, Streams>(value(dim), value(dim + 16), out + dim);
  if (dim < dims) put16<To, Streams>(value(dim), out + dim);
}

/// The rows of one step.
struct StepRows {
  const BlockCodes& block;
  const RowsTarget& target;
  uint32_t step;
  LevelRows& levels;

  /// Calls put(row) for each one that is wanted, all of them from dim `first` on.
  template <Dtype To, typename Put>
  POLYKV_INLINE void for_each(uint32_t first, Put put) const {
    const RowsTarget to = target;  // what is written is not this
    const float* gains = block.gains;
    const uint8_t* row = levels.row(0) + first;
    const size_t row_bytes = levels.stride;
    auto* out = static_cast<ElementOf<To>*>(to.data) + first;
    const bool is_k = block.is_k;
    for (uint32_t i = 0; i < kStepTokens; ++i, row += row_bytes) {
      const uint32_t token = step_token(is_k, step, i);
      if (token < to.low || token >= to.high) continue;
      put(TileRow{row, out + static_cast<int64_t>(token - to.low) * to.stride, gains[token]});
    }
  }
};

template <Dtype To, bool Streams, uint32_t Tiles>
POLYKV_TARGET void put_tiles_of(const StepRows& rows, uint32_t first, const float* means) {
  std::array<std::array<uint32_t, 2>, Tiles> turned;
  for (uint32_t i = 0; i < Tiles; ++i)
    turned[i] = kTurnedLanes[rows.block.rule.turns_signs ? 1 : 0][first / kTileDims + i];
  rows.for_each<To>(first, [&](const TileRow& row) POLYKV_TARGET {
    put_tiles<To, Streams, Tiles>(row, turned, means + first);
  });
}
template <Dtype To, bool Streams>
POLYKV_TARGET void put_tail_of(const StepRows& rows, uint32_t first, const float* means) {
  const auto turned = kTurnedLanes[rows.block.rule.turns_signs ? 1 : 0][first / kTileDims];
  const uint32_t dims = rows.block.dims - first;
  rows.for_each<To>(first, [&](const TileRow& row) POLYKV_TARGET {
    put_tail<To, Streams>(row, dims, turned, means + first);
  });
}

template <Dtype To, bool Streams>
POLYKV_TARGET void put_step(const StepRows& rows, const float* means) {
  const uint32_t dims = rows.block.dims;
  if (!rows.block.rule.rotated) {
    rows.for_each<To>(
        0, [&](const TileRow& row) POLYKV_TARGET { put_levels<To, Streams>(row, dims, means); });
    return;
  }
  uint32_t first = 0;
  for (; dims - first >= 256; first += 256) put_tiles_of<To, Streams, 4>(rows, first, means);
  if ((dims & 128U) != 0) {
    put_tiles_of<To, Streams, 2>(rows, first, means);
    first += 128;
  }
  if ((dims & 64U) != 0) {
    put_tiles_of<To, Streams, 1>(rows, first, means);
    first += 64;
  }
  if (first < dims) put_tail_of<To, Streams>(rows, first, means);
}

template <Dtype To>
POLYKV_TARGET inline void put_block(const BlockCodes& block, const RowsTarget& target) {
  alignas(64) static constexpr float kNoMeans[kMaxHeadDim] = {};
  const float* means = block.means == nullptr ? kNoMeans : block.means;
  const StepLevels unpack = step_levels(block.rule, block.is_k);
  const size_t step_bytes = size_t{block.dims} * block.rule.bits * kStepTokens / 8;
  LevelRows levels(block.dims);
  for (uint32_t step = 0; step < kSteps; ++step) {
    for (size_t at = 0; at < step_bytes; at += 64)
      _mm_prefetch(reinterpret_cast<const char*>(block.next + step * step_bytes + at), _MM_HINT_T0);
    unpack(block.codes, block.dims, step, levels);
    const StepRows rows{block, target, step, levels};
    target.streams ? put_step<To, true>(rows, means) : put_step<To, false>(rows, means);
  }
  if (target.streams) _mm_sfence();
}

POLYKV_TARGET void decode_block_rows(const BlockCodes& block, const RowsTarget& target) {
  switch (target.dtype) {
    case Dtype::f32:
      return put_block<Dtype::f32>(block, target);
    case Dtype::f16:
      return put_block<Dtype::f16>(block, target);
    case Dtype::bf16:
      return put_block<Dtype::bf16>(block, target);
  }
}
