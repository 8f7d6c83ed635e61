// AVX2: codes to rows of any dtype, eight tokens at a time.
//
// Levels are integers that fit int8 and the transform only adds and subtracts, so that it is exact
// in 16 bits: at most 256 dims * 108 < 2^15 (kMostFusedDims). Integers become floats from the upper
// bits of 32, where one shuffle puts eight of them in their order; what that multiplies them by is
// taken from the gain, which is why a layer's gains must not be too small (kLeastFusedExponent).

#include "kernels/cpu/ops_levels.inl"

POLYKV_TARGET inline void butterfly(__m256i& a, __m256i& b) {
  const __m256i sum = _mm256_add_epi16(a, b);
  b = _mm256_sub_epi16(a, b);
  a = sum;
}

/// The transform of 32 levels, in 16 bits: dims 0 to 15 and 16 to 31, each in the order of kOrder16.
/// Each step pairs other dims by interleaving the two vectors; the bytes are put in an order first
/// that makes the last step leave them in that one.
POLYKV_TARGET inline void walsh_hadamard32(__m256i levels, __m256i& low, __m256i& high) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
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

// Sixteen integers of 16 bits lie so that their lower halves are dims 0 to 7, half in each lane.
constexpr uint32_t kOrder16[16] = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};

// As kSigns, in that order.
constexpr auto kSigns16 = [] {
  std::array<std::array<int16_t, kMaxHeadDim>, 2> signs{};
  for (uint32_t i = 0; i < kMaxHeadDim; ++i) {
    signs[0][i] = 1;
    signs[1][i] = rotation_turns(i - i % 16 + kOrder16[i % 16]) ? -1 : 1;
  }
  return signs;
}();

template <Dtype To>
using ElementOf = std::conditional_t<To == Dtype::f32, float, uint16_t>;

POLYKV_TARGET inline __m128i bf16_of(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));  // NaN stays one
  const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
  const __m256i upper = _mm256_srli_epi32(chosen, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

template <Dtype To>
POLYKV_TARGET inline __m128i half_of(__m256 values) {
  if constexpr (To == Dtype::bf16) return bf16_of(values);
  return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
}

/// Streams: past the caches; `out` is aligned to the 32 bytes.
template <bool Streams>
POLYKV_TARGET inline void put_bytes(void* out, __m256i bytes) {
  auto* to = static_cast<__m256i*>(out);
  Streams ? _mm256_stream_si256(to, bytes) : _mm256_storeu_si256(to, bytes);
}

/// Sixteen values: integers, in the upper bits of 32, times the gain, plus the means.
template <Dtype To, bool Streams>
POLYKV_TARGET inline void put16(__m256i low, __m256i high, __m256 gain, const float* means,
                                ElementOf<To>* out) {
  const __m256 first = _mm256_fmadd_ps(_mm256_cvtepi32_ps(low), gain, _mm256_loadu_ps(means));
  const __m256 second = _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), gain, _mm256_loadu_ps(means + 8));
  if constexpr (To == Dtype::f32) {
    put_bytes<Streams>(out, _mm256_castps_si256(first));
    put_bytes<Streams>(out + 8, _mm256_castps_si256(second));
  } else {
    put_bytes<Streams>(out, _mm256_inserti128_si256(_mm256_castsi128_si256(half_of<To>(first)),
                                                    half_of<To>(second), 1));
  }
}

// Shuffles bytes 0 to 7 into the upper bytes of eight integers; others are zeroed.
constexpr auto kUpperBytes = [] {
  std::array<int8_t, 32> bytes{};
  for (uint32_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<int8_t>(i % 4 == 3 ? i / 4 : 0x80);
  return bytes;
}();

/// Levels as they are.
template <Dtype To, bool Streams>
POLYKV_TARGET void put_levels(const int8_t* levels, uint32_t count, float gain, const float* means,
                              ElementOf<To>* out) {
  const __m256i low = load256(kUpperBytes.data());
  const __m256i high = _mm256_or_si256(low, _mm256_set1_epi32(0x08000000));
  const __m256 gain8 = _mm256_set1_ps(gain * 0x1p-24F);
#pragma GCC unroll 2
  for (uint32_t i = 0; i < count; i += 16) {
    const __m256i both =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(levels + i)));
    put16<To, Streams>(_mm256_shuffle_epi8(both, low), _mm256_shuffle_epi8(both, high), gain8,
                       means + i, out + i);
  }
}

/// Levels rotated back, one block of the transform: Vectors * 16 dims.
template <Dtype To, bool Streams, uint32_t Vectors>
POLYKV_TARGET void put_rotated(const int8_t* levels, const int16_t* signs, float gain,
                               const float* means, ElementOf<To>* out) {
  __m256i x[Vectors == 1 ? 2 : Vectors];
  if constexpr (Vectors == 1) {
    walsh_hadamard32(
        _mm256_zextsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(levels))), x[0],
        x[1]);
  } else {
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Vectors; i += 2)
      walsh_hadamard32(load256(levels + i * 16), x[i], x[i + 1]);
  }
#pragma GCC unroll 3
  for (uint32_t half = 2; half < Vectors; half *= 2) {
#pragma GCC unroll 16
    for (uint32_t i = 0; i < Vectors; ++i) {
      if ((i & half) == 0) butterfly(x[i], x[i + half]);
    }
  }
  const float norm = 1 / std::sqrt(static_cast<float>(Vectors * 16));
  const __m256 gain8 = _mm256_set1_ps(gain * norm * 0x1p-16F);
  const __m256i zero = _mm256_setzero_si256();
#pragma GCC unroll 16
  for (uint32_t i = 0; i < Vectors; ++i) {
    const __m256i turned = _mm256_sign_epi16(x[i], load256(signs + i * 16));
    put16<To, Streams>(_mm256_unpacklo_epi16(zero, turned), _mm256_unpackhi_epi16(zero, turned),
                       gain8, means + i * 16, out + i * 16);
  }
}

template <Dtype To, bool Streams>
POLYKV_TARGET inline auto put_rotated_of(uint32_t count) {
  switch (count) {
    case 16:
      return put_rotated<To, Streams, 1>;
    case 32:
      return put_rotated<To, Streams, 2>;
    case 64:
      return put_rotated<To, Streams, 4>;
    case 128:
      return put_rotated<To, Streams, 8>;
    default:
      return put_rotated<To, Streams, 16>;
  }
}

template <Dtype To, bool Streams>
POLYKV_TARGET void put_block(const BlockCodes& block, const RowsTarget& target) {
  alignas(32) float means[kMaxHeadDim];
  if (block.means == nullptr) std::memset(means, 0, block.dims * sizeof *means);
  if (block.means != nullptr) std::memcpy(means, block.means, block.dims * sizeof *means);
  const StepLevels unpack = step_levels(block.rule, block.is_k);
  const int16_t* signs = kSigns16[block.rule.turns_signs ? 1 : 0].data();
  const size_t step_bytes = size_t{block.dims} * block.rule.bits;
  LevelRows levels(block.dims);
  for (uint32_t step = 0; step < kSteps; ++step) {
    const auto for_each_row = [&](auto put) POLYKV_TARGET {
      for (uint32_t i = 0; i < kStepTokens; ++i) {
        const uint32_t token = step_token(block.is_k, step, i);
        if (token < target.low || token >= target.high) continue;
        put(levels.row(i), block.gains[token],
            static_cast<ElementOf<To>*>(target.data) +
                static_cast<int64_t>(token - target.low) * target.stride);
      }
    };
    for (size_t at = 0; at < step_bytes; at += 64)
      _mm_prefetch(reinterpret_cast<const char*>(block.next + step * step_bytes + at), _MM_HINT_T0);
    unpack(block.codes, block.dims, step, levels);
    if (!block.rule.rotated) {
      for_each_row([&](const int8_t* row, float gain, ElementOf<To>* out) POLYKV_TARGET {
        put_levels<To, Streams>(row, block.dims, gain, means, out);
      });
      continue;
    }
    for_each_rotation_block(block.dims, [&](uint32_t first, uint32_t count) POLYKV_TARGET {
      const auto put_rotated = put_rotated_of<To, Streams>(count);
      for_each_row([&](const int8_t* row, float gain, ElementOf<To>* out) POLYKV_TARGET {
        put_rotated(row + first, signs + first, gain, means + first, out + first);
      });
    });
  }
  if (Streams) _mm_sfence();
}

template <Dtype To>
POLYKV_TARGET inline void put_block(const BlockCodes& block, const RowsTarget& target) {
  target.streams ? put_block<To, true>(block, target) : put_block<To, false>(block, target);
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
