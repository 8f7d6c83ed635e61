// The loops for rotated rows of 3 to 6 bits (kernels/codebooks.h); included behind ops_impl.inl, in
// the same way.

#include "kernels/cpu/ops_scale_search.inl"

constexpr uint32_t kBytes03 = 0x03030303U;
constexpr uint32_t kBytes0f = 0x0f0f0f0fU;
static_assert(kRotationDims % (2 * kLanes8) == 0);

// Of dims that are not turned, and that are.
constexpr auto kSigns = [] {
  std::array<std::array<float, kMaxHeadDim>, 2> signs{};
  for (uint32_t dim = 0; dim < kMaxHeadDim; ++dim) {
    signs[0][dim] = 1;
    signs[1][dim] = rotation_turns(dim) ? -1.0F : 1.0F;
  }
  return signs;
}();
inline const float* signs_of(const TensorRule& rule) {
  return kSigns[rule.turns_signs ? 1 : 0].data();
}

// A factor beyond fp32 is a power of two, which is exact, times the rest.
POLYKV_TARGET inline void scale_and_rotate(float* row, uint32_t dims, double factor,
                                           const float* signs) {
  const int exponent = std::ilogb(factor) / 2;
  const float power = std::ldexp(1.0F, exponent);
  const double rest = std::ldexp(factor, -exponent);
  for_each_rotation_block(dims, [&](uint32_t first, uint32_t count) POLYKV_TARGET {
    const auto scale = static_cast<float>(rest / std::sqrt(static_cast<double>(count)));
    for (uint32_t i = first; i < first + count; ++i) row[i] = row[i] * power * (signs[i] * scale);
    walsh_hadamard(row + first, count);
  });
}

POLYKV_TARGET inline void look_up(const uint8_t* codes, uint32_t dims, const Codebook& book,
                                  float* row) {
  uint32_t i = 0;
#if POLYKV_AVX2
  // Sixteen levels a table; the code's bits above the fourth choose among them.
  __m128i tables[4];
  std::memcpy(tables, book.levels.data(), sizeof tables);
  if (book.bits == 3) tables[0] = _mm_unpacklo_epi64(tables[0], tables[0]);
  for (; i < dims; i += 16) {
    const __m128i index = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    __m128i levels = _mm_shuffle_epi8(tables[0], index);
    if (book.bits > 4) {
      const __m128i bit4 = _mm_slli_epi16(index, 3);
      levels = _mm_blendv_epi8(levels, _mm_shuffle_epi8(tables[1], index), bit4);
      if (book.bits > 5) {
        const __m128i upper = _mm_blendv_epi8(_mm_shuffle_epi8(tables[2], index),
                                              _mm_shuffle_epi8(tables[3], index), bit4);
        levels = _mm_blendv_epi8(levels, upper, _mm_slli_epi16(index, 2));
      }
    }
    _mm256_storeu_ps(row + i, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(levels)));
    _mm256_storeu_ps(row + i + 8,
                     _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(levels, 8))));
  }
#endif
  for (; i < dims; ++i) row[i] = book.levels[codes[i]];
}

POLYKV_TARGET void rotated_decode_rows(const uint8_t* codes, uint32_t dims, const TensorRule& rule,
                                       const float* gains, const float* means, float* rows,
                                       int64_t stride) {
  static constexpr float kNoMeans[kMaxHeadDim] = {};
  if (means == nullptr) means = kNoMeans;
  const Codebook& book = codebook(rule.bits);
  const float* signs = signs_of(rule);
  for (uint32_t token = 0; token < kBlockTokens; ++token) {
    float* row = rows + token * stride;
    look_up(codes + size_t{token} * dims, dims, book, row);
    for_each_rotation_block(dims, [&](uint32_t first, uint32_t count) POLYKV_TARGET {
      walsh_hadamard(row + first, count);
      const float norm = 1 / std::sqrt(static_cast<float>(count));
      // The gain last: it may be denormal, and has few bits to lose then.
      const float gain = gains[token];
      for (uint32_t i = first; i < first + count; ++i)
        row[i] = row[i] * norm * (signs[i] * gain) + means[i];
    });
  }
}

POLYKV_TARGET void rotate_in_place(float* row, uint32_t dims, const TensorRule& rule) {
  scale_and_rotate(row, dims, 1, signs_of(rule));
}

POLYKV_TARGET void rotate_back_in_place(float* row, uint32_t dims, const TensorRule& rule) {
  const float* signs = signs_of(rule);
  for_each_rotation_block(dims, [&](uint32_t first, uint32_t count) POLYKV_TARGET {
    const float scale = 1 / std::sqrt(static_cast<float>(count));
    walsh_hadamard(row + first, count);
    for (uint32_t i = first; i < first + count; ++i) row[i] *= signs[i] * scale;
  });
}

// Four codes of a byte each, by memcpy: rows of codes are not aligned to words for the compiler.
POLYKV_TARGET inline uint32_t load_word(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}
POLYKV_TARGET inline void store_word(uint8_t* bytes, uint32_t word) {
  std::memcpy(bytes, &word, sizeof word);
}

constexpr uint32_t kPieceQuads = kPieceDims / 4;

// Calls action(token's lane in a group of 16, group of the piece, codes of the token's 16 dims,
// piece).
template <typename Codes, typename Piece, typename Action>
POLYKV_TARGET inline void for_each_piece_row(Codes* codes, uint32_t dims, uint32_t bits,
                                             Piece* pieces, Action action) {
  for (uint32_t token = 0; token < kBlockTokens; ++token) {
    for (uint32_t dim = 0; dim < dims; dim += kPieceDims) {
      Piece* piece = pieces + k_line_offset(token - token % 16, dim, dims, bits, 0);
      action(token % 16, token % kPieceTokens / 16, codes + size_t{token} * dims + dim, piece);
    }
  }
}

POLYKV_TARGET void k_unpack_pieces(const uint8_t* pieces, uint32_t dims, uint32_t bits,
                                   uint8_t* codes) {
  const auto unpack = [&](uint32_t lane, uint32_t group, uint8_t* row,
                          const uint8_t* piece) POLYKV_TARGET {
    const uint8_t* low = piece + size_t{group} * 2 * kPieceLineBytes + lane * 4;
    const uint32_t words[2] = {load_word(low), load_word(low + kPieceLineBytes)};
    uint32_t quads[kPieceQuads];
    for (uint32_t i = 0; i < kPieceQuads; ++i) {
      quads[i] = (words[i / 2] >> (i % 2 * 4)) & kBytes0f;
    }
    const uint8_t* high = piece + size_t{kPieceLowLines} * kPieceLineBytes + lane * 4;
    if (bits == 5) {
      const uint32_t word = load_word(high) >> (4 * group);
      for (uint32_t i = 0; i < kPieceQuads; ++i) quads[i] |= ((word >> i) & kBytes01) << 4;
    } else if (bits == 6) {
      const uint32_t word = load_word(high + size_t{group} * kPieceLineBytes);
      for (uint32_t i = 0; i < kPieceQuads; ++i) quads[i] |= ((word >> (2 * i)) & kBytes03) << 4;
    }
    for (uint32_t i = 0; i < kPieceQuads; ++i) store_word(row + i * 4, quads[i]);
  };
  for_each_piece_row(codes, dims, bits, pieces, unpack);
}

// V4 and V5: the planes of a group of 8 token quads to its codes.
POLYKV_TARGET inline void nibbles_take_planes(const uint8_t* planes, uint32_t dims, uint32_t bits,
                                              uint32_t (*quads)[kMaxHeadDim]) {
  for (uint32_t quad = 0; quad < kGroupQuads; ++quad) {
    const uint8_t* low = planes + size_t{quad / 2} * dims * 4;
    const uint8_t* high = planes + size_t{4} * dims * 4;
    const uint32_t shift = quad % 2 * 4;
    if (bits == 4) {
      for (uint32_t i = 0; i < dims; ++i) {
        quads[quad][i] = (load_word(low + size_t{i} * 4) >> shift) & kBytes0f;
      }
    } else {
      for (uint32_t i = 0; i < dims; ++i) {
        quads[quad][i] = ((load_word(low + size_t{i} * 4) >> shift) & kBytes0f) |
                         ((load_word(high + size_t{i} * 4) >> quad) & kBytes01) << 4;
      }
    }
  }
}

POLYKV_TARGET void v_unpack_planes(const uint8_t* planes, uint32_t dims, uint32_t bits,
                                   uint8_t* codes) {
  alignas(64) uint32_t quads[kGroupQuads][kMaxHeadDim];
  for (uint32_t group = 0; group < kTokenQuads / kGroupQuads; ++group) {
    const uint8_t* in = planes + size_t{group} * bits * dims * 4;
    bits == 3 ? v3_take_planes(in, dims, quads) : nibbles_take_planes(in, dims, bits, quads);
    for (uint32_t quad = 0; quad < kGroupQuads; ++quad) {
      for (uint32_t lane = 0; lane < 4; ++lane) {
        uint8_t* row = codes + size_t{quad_token(group * kGroupQuads + quad, lane)} * dims;
        for (uint32_t i = 0; i < dims; ++i) {
          row[i] = static_cast<uint8_t>(quads[quad][i] >> (8 * lane));
        }
      }
    }
  }
}
