// The loops of Ops, written so that GCC and clang vectorise them. Included once per instruction
// set, inside a namespace of its own, with POLYKV_TARGET set to the function attribute and
// POLYKV_AVX2 to 0 or 1.

constexpr uint32_t kBytes01 = 0x01010101U;
constexpr uint32_t kBytes07 = 0x07070707U;

POLYKV_TARGET void f32_from_bf16_loop(const uint16_t* source, float* target, size_t count) {
  for (size_t i = 0; i < count; ++i) target[i] = f32_from_bf16(source[i]);
}

POLYKV_TARGET void bf16_from_f32_loop(const float* source, uint16_t* target, size_t count) {
  for (size_t i = 0; i < count; ++i) target[i] = bf16_from_f32(source[i]);
}

POLYKV_TARGET void f32_from_f16_loop(const uint16_t* source, float* target, size_t count) {
  size_t i = 0;
#if POLYKV_AVX2
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(half));
  }
#endif
  for (; i < count; ++i) target[i] = f32_from_f16(source[i]);
}

POLYKV_TARGET void f16_from_f32_loop(const float* source, uint16_t* target, size_t count) {
  size_t i = 0;
#if POLYKV_AVX2
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), half);
  }
#endif
  for (; i < count; ++i) target[i] = f16_from_f32(source[i]);
}

// Magnitudes are compared as integers: the order is the same, and NaN is the largest instead of
// being lost.
POLYKV_TARGET void max_abs_rows(const Rows& rows, const float* means, float* largest) {
  for (uint32_t row = 0; row < rows.count; ++row) {
    const float* values = rows.data + row * rows.stride;
    uint32_t bits = 0;
    if (means == nullptr) {
      for (uint32_t i = 0; i < rows.dims; ++i) {
        const uint32_t magnitude = std::bit_cast<uint32_t>(values[i]) & 0x7fffffffU;
        bits = magnitude > bits ? magnitude : bits;
      }
    } else {
      for (uint32_t i = 0; i < rows.dims; ++i) {
        const uint32_t magnitude = std::bit_cast<uint32_t>(values[i] - means[i]) & 0x7fffffffU;
        bits = magnitude > bits ? magnitude : bits;
      }
    }
    largest[row] = std::bit_cast<float>(bits);
  }
}

POLYKV_TARGET void add_rows_to(const Rows& rows, double* sums) {
  for (uint32_t row = 0; row < rows.count; ++row) {
    const float* values = rows.data + row * rows.stride;
    for (uint32_t i = 0; i < rows.dims; ++i) sums[i] += values[i];
  }
}

POLYKV_TARGET void norms_of(const Rows& rows, double* norms) {
  constexpr uint32_t kLanes = 8;
  for (uint32_t row = 0; row < rows.count; ++row) {
    const float* values = rows.data + row * rows.stride;
    double sums[kLanes] = {};
    for (uint32_t i = 0; i + kLanes <= rows.dims; i += kLanes) {
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        const double value = values[i + lane];
        sums[lane] += value * value;
      }
    }
    for (uint32_t i = rows.dims / kLanes * kLanes; i < rows.dims; ++i) {
      sums[0] += static_cast<double>(values[i]) * values[i];
    }
    double sum = 0;
    for (const double part : sums) sum += part;
    norms[row] = std::sqrt(sum);
  }
}

// Codes of one row. Adding 1.5 * 2^23 rounds to nearest even into the low bits, and is exact because gains keep
// quotients below 128.5; the clamp is on integers because that stays free of branches. A zero gain gives zeros.
POLYKV_TARGET inline void quantize_row(const float* values, const float* means, float gain,
                                       uint32_t dims, int32_t* codes) {
  constexpr float kRound = 12582912.0F;
  static constexpr float kNoMeans[kMaxHeadDim] = {};
  const float divisor = gain == 0 ? std::numeric_limits<float>::infinity() : gain;
  if (means == nullptr) means = kNoMeans;
  for (uint32_t i = 0; i < dims; ++i) {
    const float rounded = (values[i] - means[i]) / divisor + kRound;
    const int32_t code = std::bit_cast<int32_t>(rounded) - std::bit_cast<int32_t>(kRound);
    codes[i] = std::clamp(code, -127, 127);
  }
}

POLYKV_TARGET void k8_pack_rows(const Rows& rows, const float* means, const float* gains,
                                uint8_t* codes) {
  alignas(64) int32_t row_codes[kMaxHeadDim];
  alignas(64) uint8_t row_bytes[kMaxHeadDim];
  for (uint32_t row = 0; row < rows.count; ++row) {
    if (gains[row] < 0) continue;
    quantize_row(rows.data + row * rows.stride, means, gains[row], rows.dims, row_codes);
    for (uint32_t i = 0; i < rows.dims; ++i) {
      row_bytes[i] = static_cast<uint8_t>(row_codes[i] + kKeyBias);
    }
    for (uint32_t quad = 0; quad < rows.dims / 4; ++quad) {
      std::memcpy(codes + quad * 4 * kBlockTokens + row * 4, row_bytes + quad * 4, 4);
    }
  }
}

// Lanes of a token quad that hold a row are filled from lane_codes(row, out), others are zero.
template <typename LaneCodes>
POLYKV_TARGET inline void fill_quad(uint32_t quad, uint32_t row_count, uint32_t dims,
                                    uint32_t* words, LaneCodes lane_codes) {
  alignas(64) int32_t lane_values[kMaxHeadDim];
  std::memset(words, 0, dims * sizeof *words);
  for (uint32_t lane = 0; lane < 4; ++lane) {
    const uint32_t row = quad_token(quad, lane);
    if (row >= row_count || !lane_codes(row, lane_values)) continue;
    for (uint32_t i = 0; i < dims; ++i) {
      words[i] |= (static_cast<uint32_t>(lane_values[i]) & 0xffU) << (8 * lane);
    }
  }
}

POLYKV_TARGET void v8_pack_rows(const Rows& rows, const float* gains, uint8_t* codes) {
  alignas(64) uint32_t words[kMaxHeadDim];
  for (uint32_t quad = 0; quad < kTokenQuads; ++quad) {
    fill_quad(quad, rows.count, rows.dims, words, [&](uint32_t row, int32_t* out) {
      if (gains[row] < 0) return false;
      quantize_row(rows.data + row * rows.stride, nullptr, gains[row], rows.dims, out);
      return true;
    });
    std::memcpy(codes + size_t{quad} * rows.dims * 4, words, rows.dims * sizeof *words);
  }
}

using Float8 = float __attribute__((vector_size(32)));

// Three stages inside a vector of eight.
POLYKV_TARGET inline void walsh_hadamard8(Float8& x) {
  constexpr Float8 kSign1 = {1, -1, 1, -1, 1, -1, 1, -1};
  constexpr Float8 kSign2 = {1, 1, -1, -1, 1, 1, -1, -1};
  constexpr Float8 kSign4 = {1, 1, 1, 1, -1, -1, -1, -1};
  x = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6) + x * kSign1;
  x = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5) + x * kSign2;
  x = __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3) + x * kSign4;
}

// 64 values stay in eight vectors for all six stages.
POLYKV_TARGET inline void walsh_hadamard64(float* row) {
  Float8 x[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    // One vector at a time: a single copy of all of them goes through the stack in halves.
    std::memcpy(&x[i], row + 8 * i, sizeof x[i]);
    walsh_hadamard8(x[i]);
  }
#pragma GCC unroll 3
  for (int half = 1; half < 8; half *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      if ((i & half) != 0) continue;
      const Float8 sum = x[i] + x[i + half];
      x[i + half] = x[i] - x[i + half];
      x[i] = sum;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) std::memcpy(row + 8 * i, &x[i], sizeof x[i]);
}

// Unnormalised Walsh-Hadamard transform in place; dims is a power of two >= 8.
POLYKV_TARGET inline void walsh_hadamard(float* row, uint32_t dims) {
  constexpr uint32_t kInVectors = 64;
  uint32_t half = 8;
  if (dims >= kInVectors) {
    for (uint32_t i = 0; i < dims; i += kInVectors) walsh_hadamard64(row + i);
    half = kInVectors;
  } else {
    for (uint32_t i = 0; i < dims; i += 8) {
      Float8 x;
      std::memcpy(&x, row + i, sizeof x);
      walsh_hadamard8(x);
      std::memcpy(row + i, &x, sizeof x);
    }
  }
  for (; half < dims; half *= 2) {
    for (uint32_t start = 0; start < dims; start += 2 * half) {
      for (uint32_t i = start; i < start + half; i += 8) {
        Float8 a;
        Float8 b;
        std::memcpy(&a, row + i, sizeof a);
        std::memcpy(&b, row + i + half, sizeof b);
        const Float8 sum = a + b;
        const Float8 difference = a - b;
        std::memcpy(row + i, &sum, sizeof sum);
        std::memcpy(row + i + half, &difference, sizeof difference);
      }
    }
  }
}

POLYKV_TARGET inline void rotate_row(const float* values, float divisor, uint32_t dims,
                                     float* out) {
  for (uint32_t i = 0; i < dims; ++i) out[i] = values[i] / divisor;
  walsh_hadamard(out, dims);
}

// The nearest codebook entry is the number of boundaries beneath the value.
POLYKV_TARGET inline void nearest_codes(const float* values, uint32_t dims, int32_t* codes) {
  for (uint32_t i = 0; i < dims; ++i) {
    int32_t code = 0;
    for (const float boundary : kPaperBoundaries) code += values[i] > boundary ? 1 : 0;
    codes[i] = code;
  }
}

// The planes of a group of 8 token quads, whose codes are a byte each.
POLYKV_TARGET inline void v3_put_planes(const uint32_t (*quads)[kMaxHeadDim], uint32_t dims,
                                        uint8_t* planes) {
  for (uint32_t plane = 0; plane < kV3Planes; ++plane) {
    uint8_t* out = planes + size_t{plane} * dims * 4;
    for (uint32_t d = 0; d < dims; ++d) {
      const uint32_t word = quads[2 * plane][d] | quads[2 * plane + 1][d] << 4 |
                            ((quads[6][d] >> plane) & kBytes01) << 3 |
                            ((quads[7][d] >> plane) & kBytes01) << 7;
      std::memcpy(out + size_t{d} * 4, &word, sizeof word);
    }
  }
}

POLYKV_TARGET inline void v3_take_planes(const uint8_t* planes, uint32_t dims,
                                         uint32_t (*quads)[kMaxHeadDim]) {
  for (uint32_t i = 0; i < dims; ++i) {
    uint32_t w[kV3Planes];
    for (uint32_t p = 0; p < kV3Planes; ++p) {
      std::memcpy(&w[p], planes + (size_t{p} * dims + i) * 4, sizeof w[p]);
      quads[2 * p][i] = w[p] & kBytes07;
      quads[2 * p + 1][i] = (w[p] >> 4) & kBytes07;
    }
    quads[6][i] =
        ((w[0] >> 3) & kBytes01) | ((w[1] >> 3) & kBytes01) << 1 | ((w[2] >> 3) & kBytes01) << 2;
    quads[7][i] =
        ((w[0] >> 7) & kBytes01) | ((w[1] >> 7) & kBytes01) << 1 | ((w[2] >> 7) & kBytes01) << 2;
  }
}

POLYKV_TARGET void v3_pack_rows(const Rows& rows, const float* divisors, uint8_t* codes) {
  alignas(64) uint32_t quads[kGroupQuads][kMaxHeadDim];
  alignas(64) float rotated[kMaxHeadDim];
  for (uint32_t group = 0; group < kTokenQuads / kGroupQuads; ++group) {
    for (uint32_t i = 0; i < kGroupQuads; ++i) {
      const uint32_t quad = group * kGroupQuads + i;
      fill_quad(quad, rows.count, rows.dims, quads[i], [&](uint32_t row, int32_t* out) {
        rotate_row(rows.data + row * rows.stride, divisors[row], rows.dims, rotated);
        nearest_codes(rotated, rows.dims, out);
        return true;
      });
    }
    v3_put_planes(quads, rows.dims, codes + size_t{group} * kV3Planes * rows.dims * 4);
  }
}

POLYKV_TARGET void k8_unpack_rows(const uint8_t* codes, uint32_t dims, const float* gains,
                                  const float* means, float* rows, int64_t stride) {
  static constexpr float kNoMeans[kMaxHeadDim] = {};
  if (means == nullptr) means = kNoMeans;
  for (uint32_t token = 0; token < kBlockTokens; ++token) {
    const uint8_t* source = codes + token * 4;
    float* row = rows + token * stride;
    const float gain = gains[token];
    uint32_t i = 0;
#if POLYKV_AVX2
    const __m256 gain8 = _mm256_set1_ps(gain);
    const __m256i bias8 = _mm256_set1_epi32(kKeyBias);
    for (; i + 8 <= dims; i += 8) {
      uint32_t low;
      uint32_t high;
      std::memcpy(&low, source + i * kBlockTokens, 4);
      std::memcpy(&high, source + (i + 4) * kBlockTokens, 4);
      const __m128i bytes =
          _mm_insert_epi32(_mm_cvtsi32_si128(static_cast<int>(low)), static_cast<int>(high), 1);
      const __m256i centred = _mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), bias8);
      const __m256 value =
          _mm256_fmadd_ps(_mm256_cvtepi32_ps(centred), gain8, _mm256_loadu_ps(means + i));
      _mm256_storeu_ps(row + i, value);
    }
#endif
    for (; i < dims; ++i) {
      const int code = source[(i / 4) * 4 * kBlockTokens + i % 4] - kKeyBias;
      row[i] = static_cast<float>(code) * gain + means[i];
    }
  }
}

POLYKV_TARGET void v8_unpack_rows(const uint8_t* codes, uint32_t dims, const float* gains,
                                  float* rows, int64_t stride) {
  for (uint32_t quad = 0; quad < kTokenQuads; ++quad) {
    const uint8_t* source = codes + size_t{quad} * dims * 4;
    for (uint32_t lane = 0; lane < 4; ++lane) {
      const uint32_t token = quad_token(quad, lane);
      float* row = rows + token * stride;
      const float gain = gains[token];
      const uint32_t shift = 24 - 8 * lane;
      for (uint32_t i = 0; i < dims; ++i) {
        uint32_t word;
        std::memcpy(&word, source + size_t{i} * 4, sizeof word);
        row[i] = static_cast<float>(static_cast<int32_t>(word << shift) >> 24) * gain;
      }
    }
  }
}

// One token of a quad: its codebook entries times scale, rotated back.
POLYKV_TARGET inline void v3_unpack_row(const uint32_t* quad, uint32_t lane, uint32_t dims,
                                        float scale, float* row) {
  const uint32_t shift = 8 * lane;
  uint32_t i = 0;
#if POLYKV_AVX2
  const __m256 table = _mm256_mul_ps(_mm256_loadu_ps(kPaperCodebook.data()), _mm256_set1_ps(scale));
  const __m128i shift128 = _mm_cvtsi32_si128(static_cast<int>(shift));
  for (; i + 8 <= dims; i += 8) {
    // The permutation looks at the three low bits of each lane only.
    const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(quad + i));
    _mm256_storeu_ps(row + i, _mm256_permutevar8x32_ps(table, _mm256_srl_epi32(words, shift128)));
  }
#endif
  for (; i < dims; ++i) row[i] = kPaperCodebook[(quad[i] >> shift) & 7U] * scale;
  walsh_hadamard(row, dims);
}

POLYKV_TARGET void v3_unpack_rows(const uint8_t* codes, uint32_t dims, const float* norms,
                                  float* rows, int64_t stride) {
  alignas(64) uint32_t quads[kGroupQuads][kMaxHeadDim];
  const float inverse_dims = 1.0F / static_cast<float>(dims);
  for (uint32_t group = 0; group < kTokenQuads / kGroupQuads; ++group) {
    v3_take_planes(codes + size_t{group} * kV3Planes * dims * 4, dims, quads);
    for (uint32_t i = 0; i < kGroupQuads; ++i) {
      for (uint32_t lane = 0; lane < 4; ++lane) {
        const uint32_t token = quad_token(group * kGroupQuads + i, lane);
        v3_unpack_row(quads[i], lane, dims, norms[token] * inverse_dims, rows + token * stride);
      }
    }
  }
}
