// AVX-512 with VBMI: rows of 3 to 6 bits to codes and gains, a row at a time; included behind
// ops_rotated.inl.
//
// As with AVX2 a lane is a scale while the 13 of them are compared (ops_scale_search.inl), and all
// of them fit one vector. What the search found out about a value, the two levels between which it
// lies, then gives its code by one comparison instead of one a level. For 128 dims of K5,
// operations on vectors of 64 bytes:
//
//   centring, and the sum of squares in double      64
//   signs and scale, transform                     104
//   cells                                           32
//   errors of the scales, 4 a value                512
//   codes, and what the gain is made of            120
//
// so that the search is 60 % of a row; at two operations a cycle all of it takes 416 cycles.

#include "kernels/cpu/ops_pack_avx512.inl"

/// The sum of squares of what it writes.
POLYKV_INLINE double centre_row(const float* values, const float* means, uint32_t dims,
                                float* out) {
  __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  for (uint32_t i = 0; i < dims; i += 16) {
    const __m512 value = _mm512_sub_ps(_mm512_loadu_ps(values + i), _mm512_loadu_ps(means + i));
    _mm512_store_ps(out + i, value);
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
    const __m512d high =
        _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(value), 1)));
    sums[0] = _mm512_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm512_fmadd_pd(high, high, sums[1]);
  }
  alignas(64) double parts[8];
  _mm512_store_pd(parts, _mm512_add_pd(sums[0], sums[1]));
  return ((parts[0] + parts[1]) + (parts[2] + parts[3])) +
         ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

// +1 where bit `bit` of a lane's number is zero, else -1.
constexpr auto kLaneSigns = [] {
  std::array<std::array<float, 16>, 4> signs{};
  for (uint32_t bit = 0; bit < 4; ++bit) {
    for (uint32_t lane = 0; lane < 16; ++lane) signs[bit][lane] = (lane >> bit & 1) != 0 ? -1 : 1;
  }
  return signs;
}();

POLYKV_INLINE __m512 lane_signs(uint32_t bit) {
  return _mm512_loadu_ps(kLaneSigns[bit].data());
}
/// The four steps inside a vector: each lane and the one whose number differs in a bit.
POLYKV_INLINE __m512 walsh_hadamard16(__m512 x) {
  x = _mm512_fmadd_ps(x, lane_signs(0), _mm512_permute_ps(x, 0xb1));
  x = _mm512_fmadd_ps(x, lane_signs(1), _mm512_permute_ps(x, 0x4e));
  x = _mm512_fmadd_ps(x, lane_signs(2), _mm512_shuffle_f32x4(x, x, 0xb1));
  return _mm512_fmadd_ps(x, lane_signs(3), _mm512_shuffle_f32x4(x, x, 0x4e));
}

/// Times `scale` and the signs, then the transform of Vectors * 16 dims, all of them in registers.
template <uint32_t Vectors>
POLYKV_INLINE void rotate_vectors(float* row, const float* signs, float scale) {
  __m512 x[Vectors];
#pragma GCC unroll 8
  for (uint32_t i = 0; i < Vectors; ++i) {
    const __m512 factor = _mm512_mul_ps(_mm512_loadu_ps(signs + i * 16), _mm512_set1_ps(scale));
    x[i] = walsh_hadamard16(_mm512_mul_ps(_mm512_load_ps(row + i * 16), factor));
  }
#pragma GCC unroll 3
  for (uint32_t half = 1; half < Vectors; half *= 2) {
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Vectors; ++i) {
      if ((i & half) != 0) continue;
      const __m512 sum = _mm512_add_ps(x[i], x[i + half]);
      x[i + half] = _mm512_sub_ps(x[i], x[i + half]);
      x[i] = sum;
    }
  }
#pragma GCC unroll 8
  for (uint32_t i = 0; i < Vectors; ++i) _mm512_store_ps(row + i * 16, x[i]);
}

POLYKV_TARGET inline void rotate_part(float* row, uint32_t count, const float* signs, float scale) {
  constexpr uint32_t kInRegisters = 128;
  if (count == 16) return rotate_vectors<1>(row, signs, scale);
  if (count == 32) return rotate_vectors<2>(row, signs, scale);
  if (count == 64) return rotate_vectors<4>(row, signs, scale);
  for (uint32_t i = 0; i < count; i += kInRegisters) rotate_vectors<8>(row + i, signs + i, scale);
  for (uint32_t half = kInRegisters; half < count; half *= 2) {
    for (uint32_t start = 0; start < count; start += 2 * half) {
      for (uint32_t i = start; i < start + half; i += 16) {
        const __m512 a = _mm512_load_ps(row + i);
        const __m512 b = _mm512_load_ps(row + i + half);
        _mm512_store_ps(row + i, _mm512_add_ps(a, b));
        _mm512_store_ps(row + i + half, _mm512_sub_ps(a, b));
      }
    }
  }
}

/// `factor` times the row, rotated.
POLYKV_TARGET inline void scale_and_rotate_wide(float* row, uint32_t dims, double factor,
                                                const float* signs) {
  // Factors whose parts are ordinary floats; others are as good as never.
  if (!(factor > 0x1p-100 && factor < 0x1p100)) return scale_and_rotate(row, dims, factor, signs);
  for_each_rotation_block(dims, [&](uint32_t first, uint32_t count) POLYKV_TARGET {
    const double scale = factor / std::sqrt(static_cast<double>(count));
    rotate_part(row + first, count, signs + first, static_cast<float>(scale));
  });
}

/// The magnitude's cell of each value.
POLYKV_INLINE void find_cells_wide(const float* row, uint32_t dims, float cells_per_unit,
                                   uint32_t cell_count, CelledRow& out) {
  const __m512i last = _mm512_set1_epi32(static_cast<int32_t>(cell_count - 1));
  for (uint32_t i = 0; i < dims; i += 16) {
    const __m512 magnitude = _mm512_abs_ps(_mm512_load_ps(row + i));
    const __m512i cell =
        _mm512_cvttps_epi32(_mm512_mul_ps(magnitude, _mm512_set1_ps(cells_per_unit)));
    _mm512_store_ps(out.magnitudes + i, magnitude);
    _mm512_store_si512(out.cells + i, _mm512_min_epi32(cell, last));
  }
}

/// The scale with the least sum of squared errors, the first of them.
POLYKV_INLINE uint32_t best_scale_of(const CelledRow& row, uint32_t dims, const ScaleCell* cells) {
  __m512 sums[4];  // of every fourth value, which do not wait for each other
#pragma GCC unroll 4
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (uint32_t dim = 0; dim < dims; dim += 4) {
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
      const ScaleCell& cell = cells[row.cells[dim + i]];
      const __m512 value = _mm512_set1_ps(row.magnitudes[dim + i]);
      const __m512 distance = _mm512_min_ps(_mm512_sub_ps(value, _mm512_load_ps(cell.lower)),
                                            _mm512_sub_ps(_mm512_load_ps(cell.upper), value));
      sums[i] = _mm512_fmadd_ps(distance, distance, sums[i]);
    }
  }
  const __m512 errors =
      _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
  constexpr __mmask16 kScales = (1U << kScaleCandidates) - 1;
  const float least = _mm512_mask_reduce_min_ps(kScales, errors);
  const __mmask16 equal = _mm512_cmp_ps_mask(errors, _mm512_set1_ps(least), _CMP_EQ_OQ);
  return static_cast<uint32_t>(std::countr_zero(static_cast<uint32_t>(equal & kScales)));
}

/// Of the upper half of a codebook.
template <uint32_t Bits>
struct UpperLevels {
  using Cells = ScaleCells<Bits>;
  static constexpr uint32_t kHalf = Cells::kHalf;
  static constexpr uint32_t kCellPlaces = Bits == 6 ? 128 : 64;
  static_assert(Cells::kCount <= kCellPlaces && kHalf <= 32);

  /// [scale][cell]: the number of the lower one of the two levels between which a value may lie.
  alignas(64) static constexpr auto kLower = [] {
    std::array<std::array<uint8_t, kCellPlaces>, kScaleCandidates> lower{};
    for (uint32_t scale = 0; scale < kScaleCandidates; ++scale) {
      for (uint32_t cell = 0; cell < Cells::kCount; ++cell)
        lower[scale][cell] = static_cast<uint8_t>(Cells::lower_level(cell, scale));
    }
    return lower;
  }();
  /// By number: the boundary to the next level, or what no value is beyond, and the level.
  alignas(64) static constexpr auto kNextBoundary = [] {
    std::array<float, 32> boundaries{};
    for (uint32_t i = 0; i < kHalf; ++i) {
      boundaries[i] = i + 1 < kHalf ? static_cast<float>(Cells::boundary(i + 1))
                                    : std::numeric_limits<float>::max();
    }
    return boundaries;
  }();
  alignas(64) static constexpr auto kLevels = [] {
    std::array<float, 32> levels{};
    for (uint32_t i = 0; i < kHalf; ++i) levels[i] = Cells::kBook.levels[kHalf + i];
    return levels;
  }();

  static POLYKV_INLINE __m512i lower_of(__m512i cells, uint32_t scale) {
    // Bytes above a cell's number are zero, and so is the level of cell 0.
    const uint8_t* table = kLower[scale].data();
    if constexpr (Bits == 6)
      return _mm512_permutex2var_epi8(load512(table), cells, load512(table + 64));
    return _mm512_permutexvar_epi8(cells, load512(table));
  }
  static POLYKV_INLINE __m512 look_up(__m512i numbers, const std::array<float, 32>& table) {
    if constexpr (Bits == 6) {
      return _mm512_permutex2var_ps(_mm512_loadu_ps(table.data()), numbers,
                                    _mm512_loadu_ps(table.data() + 16));
    }
    return _mm512_permutexvar_ps(numbers, _mm512_loadu_ps(table.data()));
  }
};

POLYKV_INLINE double sum_lanes(__m512 x) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  const __m512d high =
      _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
  alignas(64) double parts[8];
  _mm512_store_pd(parts, _mm512_add_pd(low, high));
  return ((parts[0] + parts[1]) + (parts[2] + parts[3])) +
         ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

/// Codes of a row with one of the scales; gives the unbiased gain.
template <uint32_t Bits>
POLYKV_INLINE double choose_codes(const float* row, const CelledRow& celled, uint32_t dims,
                                  uint32_t scale, uint8_t* codes) {
  using Levels = UpperLevels<Bits>;
  const __m512 inverse = _mm512_set1_ps(1 / static_cast<float>(Levels::Cells::kBook.scale(scale)));
  const __m512i middle = _mm512_set1_epi32(static_cast<int32_t>(Levels::kHalf));
  const __m512i mirror = _mm512_set1_epi32(static_cast<int32_t>(2 * Levels::kHalf - 1));
  __m512 energies = _mm512_setzero_ps();
  __m512 products = _mm512_setzero_ps();
  for (uint32_t i = 0; i < dims; i += 16) {
    const __m512 magnitude = _mm512_load_ps(celled.magnitudes + i);
    const __m512i lower = Levels::lower_of(load512(celled.cells + i), scale);
    const __mmask16 is_beyond =
        _mm512_cmp_ps_mask(_mm512_mul_ps(magnitude, inverse),
                           Levels::look_up(lower, Levels::kNextBoundary), _CMP_GT_OQ);
    const __m512i number = _mm512_mask_add_epi32(lower, is_beyond, lower, _mm512_set1_epi32(1));
    energies = _mm512_fmadd_ps(magnitude, magnitude, energies);
    products = _mm512_fmadd_ps(magnitude, Levels::look_up(number, Levels::kLevels), products);
    // Below zero, and at it, codes count downwards from the middle.
    const __mmask16 is_turned =
        _mm512_cmp_ps_mask(_mm512_load_ps(row + i), _mm512_setzero_ps(), _CMP_LE_OQ);
    const __m512i code = _mm512_add_epi32(number, middle);
    const __m512i turned = _mm512_mask_xor_epi32(code, is_turned, code, mirror);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(turned));
  }
  return sum_lanes(energies) / sum_lanes(products);
}

template <uint32_t Bits>
POLYKV_TARGET void encode_rows_wide(const Rows& rows, const float* means, const float* signs,
                                    uint8_t* codes, double* gains) {
  using Cells = ScaleCells<Bits>;
  alignas(64) float row[kMaxHeadDim];
  CelledRow celled;
  const uint32_t dims = rows.dims;
  for (uint32_t i = 0; i < kBlockTokens; ++i) {
    uint8_t* row_codes = codes + size_t{i} * dims;
    double energy = 0;
    if (i < rows.count && gains[i] >= 0) {
      energy = centre_row(rows.data + i * rows.stride, means, dims, row);
      gains[i] = 0;
    }
    if (energy == 0) {
      std::memset(row_codes, 0, dims);
      continue;
    }
    const double unit = std::sqrt(energy / dims) / static_cast<double>(Cells::kBook.unit);
    scale_and_rotate_wide(row, dims, 1 / unit, signs);
    find_cells_wide(row, dims, static_cast<float>(1 / Cells::kWidth), Cells::kCount, celled);
    const uint32_t scale = best_scale_of(celled, dims, Cells::kCells.data());
    gains[i] = unit * choose_codes<Bits>(row, celled, dims, scale, row_codes);
  }
}

POLYKV_TARGET void rotated_encode_rows(const Rows& rows, const float* means, const TensorRule& rule,
                                       uint8_t* codes, double* gains) {
  alignas(64) static constexpr float kNoMeans[kMaxHeadDim] = {};
  if (means == nullptr) means = kNoMeans;
  switch (rule.bits) {
    case 3:
      return encode_rows_wide<3>(rows, means, signs_of(rule), codes, gains);
    case 4:
      return encode_rows_wide<4>(rows, means, signs_of(rule), codes, gains);
    case 5:
      return encode_rows_wide<5>(rows, means, signs_of(rule), codes, gains);
    default:
      return encode_rows_wide<6>(rows, means, signs_of(rule), codes, gains);
  }
}
