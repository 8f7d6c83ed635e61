// Which of an encoder's 13 scales suits a row of 3 to 6 bits: the one whose codes have the least
// squared error. Nearly all of the time that encoding takes is spent here. Included behind
// ops_impl.inl, in the same way.

constexpr uint32_t kLanes8 = 8;
using Int8 = int32_t __attribute__((vector_size(32)));

// By reference, as vectors by value are not the same on all instruction sets.
POLYKV_TARGET inline void load8(const float* values, Float8& x) {
  std::memcpy(&x, values, sizeof x);
}

POLYKV_TARGET inline void magnitude8(Float8& x) {
  Int8 bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= 0x7fffffff;
  std::memcpy(&x, &bits, sizeof x);
}

#if POLYKV_AVX2

// What the search looks up. Levels and boundaries are twice the value, so that the midpoints between
// levels are integers too.
struct SearchTables {
  alignas(16) uint8_t levels[32];      // magnitude of level i of the upper half
  alignas(16) uint8_t boundaries[32];  // the boundary beneath it
  float factors[kScaleCandidates];     // 2 / scale
  float squared_scales[kScaleCandidates];
};

constexpr SearchTables search_tables(uint32_t bits) {
  const Codebook& book = codebook(bits);
  const uint32_t half = book.size / 2;
  SearchTables tables{};
  for (uint32_t i = 0; i < half; ++i) {
    tables.levels[i] = static_cast<uint8_t>(2 * book.levels[half + i]);
    if (i > 0) {
      tables.boundaries[i] =
          static_cast<uint8_t>(book.levels[half + i] + book.levels[half + i - 1]);
    }
  }
  for (uint32_t i = 0; i < kScaleCandidates; ++i) {
    tables.factors[i] = static_cast<float>(2 / book.scale(i));
    tables.squared_scales[i] = static_cast<float>(book.scale(i) * book.scale(i));
  }
  return tables;
}

constexpr SearchTables kSearchTables[] = {search_tables(3), search_tables(4), search_tables(5),
                                          search_tables(6)};

// From one scale to the next a value's level falls by one at most: no boundary, divided by the next
// scale, passes the one beneath it. So each level is found from the last one with one comparison.
constexpr bool levels_fall_by_one() {
  for (const Codebook& book : kCodebooks) {
    const SearchTables tables = search_tables(book.bits);
    const double ratio = book.scale(0) / book.scale(1);
    for (uint32_t i = 2; i < book.size / 2; ++i) {
      if (tables.boundaries[i - 1] > tables.boundaries[i] * ratio) return false;
    }
  }
  return true;
}
static_assert(levels_fall_by_one());

constexpr uint32_t kPaddedCandidates = (kScaleCandidates + 3) / 4 * 4;

// Looks integers of a byte up, as floats. The upper three bytes of each index are 0x80.
template <uint32_t Half>
struct LevelTable {
  __m256i low;   // 16 bytes, in both halves of the register; that byte shuffle gives 0 for 0x80
  __m256i high;  // the next 16
  __m256 few;    // up to 8 entries, as floats

  POLYKV_TARGET explicit LevelTable(const uint8_t* bytes) {
    const auto* source = reinterpret_cast<const __m128i*>(bytes);
    low = _mm256_broadcastsi128_si256(_mm_load_si128(source));
    high = _mm256_broadcastsi128_si256(_mm_load_si128(source + 1));
    few = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_load_si128(source)));
  }
  POLYKV_TARGET __m256 at(__m256i index) const {
    if constexpr (Half <= 8) {
      return _mm256_permutevar8x32_ps(few, index);
    } else if constexpr (Half <= 16) {
      return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(low, index));
    } else {
      const __m256i upper = _mm256_slli_epi32(index, 3);
      return _mm256_cvtepi32_ps(_mm256_blendv_epi8(_mm256_shuffle_epi8(low, index),
                                                   _mm256_shuffle_epi8(high, index), upper));
    }
  }
};

// Adds the squared errors of Vectors * 8 values with each candidate, a quarter of them all. Several
// vectors at a time, since the steps of one wait for each other.
template <uint32_t Half, uint32_t Vectors>
POLYKV_TARGET inline void add_errors(const float* row, const SearchTables& tables,
                                     const LevelTable<Half>& levels,
                                     const LevelTable<Half>& boundaries, __m256* sums) {
  const __m256 sign = _mm256_set1_ps(-0.0F);
  __m256 magnitudes[Vectors];
  __m256i index[Vectors];
#pragma GCC unroll 4
  for (uint32_t i = 0; i < Vectors; ++i) {
    magnitudes[i] = _mm256_andnot_ps(sign, _mm256_loadu_ps(row + i * kLanes8));
    index[i] = _mm256_set1_epi32(static_cast<int32_t>(0x80808000U));
  }
  for (uint32_t j = 1; j < Half; ++j) {
    const __m256 boundary = _mm256_set1_ps(static_cast<float>(tables.boundaries[j]) / tables.factors[0]);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < Vectors; ++i) {
      const __m256 above = _mm256_cmp_ps(magnitudes[i], boundary, _CMP_GT_OQ);
      index[i] = _mm256_sub_epi32(index[i], _mm256_castps_si256(above));
    }
  }
#pragma GCC unroll 13
  for (uint32_t candidate = 0; candidate < kScaleCandidates; ++candidate) {
    const __m256 factor = _mm256_set1_ps(tables.factors[candidate]);
    __m256 sum = _mm256_setzero_ps();
#pragma GCC unroll 4
    for (uint32_t i = 0; i < Vectors; ++i) {
      const __m256 value = _mm256_mul_ps(magnitudes[i], factor);
      if (candidate > 0) {
        const __m256 below = _mm256_cmp_ps(value, boundaries.at(index[i]), _CMP_LT_OQ);
        index[i] = _mm256_add_epi32(index[i], _mm256_castps_si256(below));
      }
      const __m256 distance = _mm256_sub_ps(value, levels.at(index[i]));
      sum = _mm256_fmadd_ps(distance, distance, sum);
    }
    sums[candidate] = _mm256_add_ps(sums[candidate], sum);
  }
}

template <uint32_t Half>
POLYKV_TARGET inline float best_scale(const float* row, uint32_t dims, const Codebook& book) {
  const SearchTables& tables = kSearchTables[book.bits - kMinCodebookBits];
  const LevelTable<Half> levels(tables.levels);
  const LevelTable<Half> boundaries(tables.boundaries);
  __m256 sums[kPaddedCandidates] = {};
  uint32_t dim = 0;
  for (; dim + 4 * kLanes8 <= dims; dim += 4 * kLanes8) {
    add_errors<Half, 4>(row + dim, tables, levels, boundaries, sums);
  }
  for (; dim < dims; dim += 2 * kLanes8) {
    add_errors<Half, 2>(row + dim, tables, levels, boundaries, sums);
  }
  alignas(32) float errors[kPaddedCandidates];
  for (uint32_t i = 0; i < kPaddedCandidates; i += 4) {
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(sums[i], sums[i + 1]),
                                        _mm256_hadd_ps(sums[i + 2], sums[i + 3]));
    _mm_store_ps(errors + i, _mm_add_ps(_mm256_castps256_ps128(pairs),
                                        _mm256_extractf128_ps(pairs, 1)));
  }
  uint32_t best = 0;
  float least = std::numeric_limits<float>::infinity();
  for (uint32_t i = 0; i < kScaleCandidates; ++i) {
    const float error = errors[i] * tables.squared_scales[i];
    best = error < least ? i : best;
    least = error < least ? error : least;
  }
  return static_cast<float>(book.scale(best));
}

#else

// least = min(least, |x - level|)
POLYKV_TARGET inline void approach8(const Float8& x, float level, Float8& least) {
  Float8 distance = x - level;
  magnitude8(distance);
  least = distance < least ? distance : least;
}

// Levels are symmetric, so magnitudes and the positive half of them do.
template <uint32_t Half>
POLYKV_TARGET inline float best_scale(const float* row, uint32_t dims, const Codebook& book) {
  float best = 0;
  float least = std::numeric_limits<float>::infinity();
  for (uint32_t candidate = 0; candidate < kScaleCandidates; ++candidate) {
    const auto scale = static_cast<float>(book.scale(candidate));
    float levels[Half];
    for (uint32_t i = 0; i < Half; ++i) levels[i] = scale * book.levels[Half + i];
    Float8 sums = {};
    for (uint32_t dim = 0; dim < dims; dim += 2 * kLanes8) {
      Float8 a;
      Float8 b;
      load8(row + dim, a);
      load8(row + dim + kLanes8, b);
      magnitude8(a);
      magnitude8(b);
      Float8 from_a = a - levels[0];
      Float8 from_b = b - levels[0];
      magnitude8(from_a);
      magnitude8(from_b);
      for (uint32_t i = 1; i < Half; ++i) {
        approach8(a, levels[i], from_a);
        approach8(b, levels[i], from_b);
      }
      sums += from_a * from_a + from_b * from_b;
    }
    float error = 0;
    for (uint32_t lane = 0; lane < kLanes8; ++lane) error += sums[lane];
    if (error < least) {
      least = error;
      best = scale;
    }
  }
  return best;
}

#endif

POLYKV_TARGET inline float best_scale(const float* row, uint32_t dims, const Codebook& book) {
  switch (book.bits) {
    case 3:
      return best_scale<4>(row, dims, book);
    case 4:
      return best_scale<8>(row, dims, book);
    case 5:
      return best_scale<16>(row, dims, book);
    default:
      return best_scale<32>(row, dims, book);
  }
}
