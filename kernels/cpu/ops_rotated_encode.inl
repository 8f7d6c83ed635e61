// Rows of 3 to 6 bits to codes and gains, and codes to lines and planes; included behind ops_rotated.inl, in the same way.

/// The sum of squares of what it writes.
POLYKV_TARGET inline double centre_row(const float* values, const float* means, uint32_t dims,
                                       float* out) {
  double sum = 0;
#if POLYKV_AVX2
  __m256d sums[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
  for (uint32_t i = 0; i < dims; i += kLanes8) {
    const __m256 value = _mm256_sub_ps(_mm256_loadu_ps(values + i), _mm256_loadu_ps(means + i));
    _mm256_storeu_ps(out + i, value);
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
    sums[0] = _mm256_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm256_fmadd_pd(high, high, sums[1]);
  }
  alignas(32) double parts[4];
  _mm256_store_pd(parts, _mm256_add_pd(sums[0], sums[1]));
  for (const double part : parts) sum += part;
#else
  for (uint32_t i = 0; i < dims; ++i) {
    const float value = values[i] - means[i];
    out[i] = value;
    sum += static_cast<double>(value) * static_cast<double>(value);
  }
#endif
  return sum;
}

// Between levels i - 1 and i of the upper half, from i = 1 on.
constexpr auto kBoundaries = [] {
  std::array<std::array<float, 32>, std::size(kCodebooks)> boundaries{};
  for (size_t book = 0; book < std::size(kCodebooks); ++book) {
    const uint32_t half = kCodebooks[book].size / 2;
    for (uint32_t i = 1; i < half; ++i) {
      boundaries[book][i] = 0.5F * static_cast<float>(kCodebooks[book].levels[half + i - 1] +
                                                      kCodebooks[book].levels[half + i]);
    }
  }
  return boundaries;
}();

// The nearest level's magnitude is the number of boundaries beneath the value's; below zero the
// codes count downwards from the middle.
POLYKV_TARGET inline void nearest_levels(const float* row, uint32_t dims, const Codebook& book,
                                         float scale, uint8_t* codes) {
  const float* boundaries = kBoundaries[book.bits - kMinCodebookBits].data();
  const float inverse = 1 / scale;
  const uint32_t half = book.size / 2;
#if POLYKV_AVX2
  const __m256i middle = _mm256_set1_epi32(static_cast<int32_t>(half));
  const __m256i mirror = _mm256_set1_epi32(static_cast<int32_t>(2 * half - 1));
  const __m256 sign = _mm256_set1_ps(-0.0F);
  for (uint32_t dim = 0; dim < dims; dim += 2 * kLanes8) {
    const __m256 values[2] = {_mm256_loadu_ps(row + dim), _mm256_loadu_ps(row + dim + kLanes8)};
    const __m256 factor = _mm256_set1_ps(inverse);
    const __m256 magnitudes[2] = {_mm256_mul_ps(_mm256_andnot_ps(sign, values[0]), factor),
                                  _mm256_mul_ps(_mm256_andnot_ps(sign, values[1]), factor)};
    __m256i found[2] = {middle, middle};
    for (uint32_t i = 1; i < half; ++i) {
      const __m256 boundary = _mm256_set1_ps(boundaries[i]);
      for (uint32_t j = 0; j < 2; ++j) {
        const __m256 above = _mm256_cmp_ps(magnitudes[j], boundary, _CMP_GT_OQ);
        found[j] = _mm256_sub_epi32(found[j], _mm256_castps_si256(above));
      }
    }
    for (uint32_t j = 0; j < 2; ++j) {
      const __m256 positive = _mm256_cmp_ps(values[j], _mm256_setzero_ps(), _CMP_GT_OQ);
      const __m256i turned = _mm256_andnot_si256(_mm256_castps_si256(positive), mirror);
      found[j] = _mm256_xor_si256(found[j], turned);
    }
    // Packing works on halves; the permutation puts the quarters back in order.
    const __m256i words =
        _mm256_permute4x64_epi64(_mm256_packs_epi32(found[0], found[1]), _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + dim),
                     _mm_packus_epi16(_mm256_castsi256_si128(words),
                                      _mm256_extracti128_si256(words, 1)));
  }
#else
  for (uint32_t dim = 0; dim < dims; ++dim) {
    uint32_t code = half;
    for (uint32_t i = 1; i < half; ++i) code += std::abs(row[dim]) * inverse > boundaries[i] ? 1 : 0;
    codes[dim] = static_cast<uint8_t>(row[dim] > 0 ? code : code ^ (2 * half - 1));
  }
#endif
}

/// Gives the unbiased gain.
POLYKV_TARGET inline double choose_codes(const float* row, uint32_t dims, const Codebook& book,
                                         float scale, uint8_t* codes) {
  nearest_levels(row, dims, book, scale, codes);
  alignas(64) float levels[kMaxHeadDim];
  look_up(codes, dims, book, levels);
  Float8 energies = {};
  Float8 products = {};
  for (uint32_t dim = 0; dim < dims; dim += kLanes8) {
    Float8 values;
    Float8 level;
    load8(row + dim, values);
    load8(levels + dim, level);
    energies += values * values;
    products += values * level;
  }
  double energy = 0;
  double product = 0;
  for (uint32_t lane = 0; lane < kLanes8; ++lane) {
    energy += static_cast<double>(energies[lane]);
    product += static_cast<double>(products[lane]);
  }
  return energy / product;
}

POLYKV_TARGET void rotated_encode_rows(const Rows& rows, const float* means,
                                       const TensorRule& rule, uint8_t* codes, double* gains) {
  static constexpr float kNoMeans[kMaxHeadDim] = {};
  alignas(64) float row[kMaxHeadDim];
  const Codebook& book = codebook(rule.bits);
  const uint32_t dims = rows.dims;
  for (uint32_t i = 0; i < kBlockTokens; ++i) {
    uint8_t* row_codes = codes + size_t{i} * dims;
    double energy = 0;
    if (i < rows.count && gains[i] >= 0) {
      energy = centre_row(rows.data + i * rows.stride, means == nullptr ? kNoMeans : means, dims,
                          row);
      gains[i] = 0;
    }
    if (energy == 0) {
      std::memset(row_codes, 0, dims);
      continue;
    }
    const double unit = std::sqrt(energy / dims) / static_cast<double>(book.unit);
    scale_and_rotate(row, dims, 1 / unit, signs_of(rule));
    gains[i] = unit * choose_codes(row, dims, book, best_scale(row, dims, book), row_codes);
  }
}

POLYKV_TARGET void k_pack_pieces(const uint8_t* codes, uint32_t dims, uint32_t bits,
                                 uint8_t* pieces) {
  const auto pack = [&](uint32_t lane, uint32_t group, const uint8_t* row, uint8_t* piece)
                        POLYKV_TARGET {
    uint32_t quads[kPieceQuads];
    for (uint32_t i = 0; i < kPieceQuads; ++i) quads[i] = load_word(row + i * 4);
    uint8_t* low = piece + size_t{group} * 2 * kPieceLineBytes + lane * 4;
    store_word(low, (quads[0] & kBytes0f) | (quads[1] & kBytes0f) << 4);
    store_word(low + kPieceLineBytes, (quads[2] & kBytes0f) | (quads[3] & kBytes0f) << 4);
    if (bits == 4) return;
    uint8_t* high = piece + size_t{kPieceLowLines} * kPieceLineBytes + lane * 4;
    uint32_t word = 0;
    if (bits == 5) {
      if (group == 1) word = load_word(high);
      for (uint32_t i = 0; i < kPieceQuads; ++i) {
        word |= ((quads[i] >> 4) & kBytes01) << (4 * group + i);
      }
      store_word(high, word);
    } else {
      for (uint32_t i = 0; i < kPieceQuads; ++i) word |= ((quads[i] >> 4) & kBytes03) << (2 * i);
      store_word(high + size_t{group} * kPieceLineBytes, word);
    }
  };
  for_each_piece_row(codes, dims, bits, pieces, pack);
}

// V4 and V5: codes of a group of 8 token quads to its planes.
POLYKV_TARGET inline void nibbles_put_planes(const uint32_t (*quads)[kMaxHeadDim], uint32_t dims,
                                             uint32_t bits, uint8_t* planes) {
  for (uint32_t plane = 0; plane < 4; ++plane) {
    uint8_t* out = planes + size_t{plane} * dims * 4;
    for (uint32_t i = 0; i < dims; ++i) {
      store_word(out + size_t{i} * 4, (quads[2 * plane][i] & kBytes0f) |
                                          (quads[2 * plane + 1][i] & kBytes0f) << 4);
    }
  }
  if (bits == 4) return;
  uint8_t* out = planes + size_t{4} * dims * 4;
  for (uint32_t i = 0; i < dims; ++i) {
    uint32_t word = 0;
    for (uint32_t quad = 0; quad < kGroupQuads; ++quad) {
      word |= ((quads[quad][i] >> 4) & kBytes01) << quad;
    }
    store_word(out + size_t{i} * 4, word);
  }
}

POLYKV_TARGET void v_pack_planes(const uint8_t* codes, uint32_t dims, uint32_t bits,
                                 uint8_t* planes) {
  alignas(64) uint32_t quads[kGroupQuads][kMaxHeadDim];
  for (uint32_t group = 0; group < kTokenQuads / kGroupQuads; ++group) {
    for (uint32_t quad = 0; quad < kGroupQuads; ++quad) {
      const uint8_t* rows[4];
      for (uint32_t lane = 0; lane < 4; ++lane) {
        rows[lane] = codes + size_t{quad_token(group * kGroupQuads + quad, lane)} * dims;
      }
      for (uint32_t i = 0; i < dims; ++i) {
        quads[quad][i] = uint32_t{rows[0][i]} | uint32_t{rows[1][i]} << 8 |
                         uint32_t{rows[2][i]} << 16 | uint32_t{rows[3][i]} << 24;
      }
    }
    uint8_t* out = planes + size_t{group} * bits * dims * 4;
    bits == 3 ? v3_put_planes(quads, dims, out) : nibbles_put_planes(quads, dims, bits, out);
  }
}
