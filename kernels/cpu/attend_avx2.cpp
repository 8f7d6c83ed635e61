#include "kernels/cpu/attend_ops.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>
#include <limits>

#include "kernels/codebooks.h"
#include "kernels/cpu/ops.h"

#define POLYKV_TARGET __attribute__((target("avx2,fma,f16c")))
#define POLYKV_INLINE POLYKV_TARGET inline __attribute__((always_inline))

namespace polykv::cpu {

namespace {

#include "kernels/cpu/exp_fast.inl"

// Levels are bytes without a sign, level + kLevelBias; what that adds to a sum of products is known
// from the sum of the other factors.
constexpr int32_t kLevelBias = 128;
constexpr uint32_t kWeightWords = 2 * kTokenQuads;
constexpr float kWeightLimit = 32767;
// Sums of products may wrap around on their way as long as they fit without the bias.
constexpr uint32_t kMostWideDims = 512;
constexpr float query_limit(uint32_t k_head_dim) {
  return k_head_dim <= kMostWideDims ? 32767.0F : 16383.0F;
}
static_assert(128LL * 32767 * kMostWideDims < INT32_MAX && 128LL * 16383 * kMaxHeadDim < INT32_MAX);
static_assert(127LL * 32767 * kBlockTokens < INT32_MAX);

POLYKV_INLINE __m256i load(const uint8_t* bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

/// Fetches from memory what will be read a block or so later. The hardware's own prefetchers stop
/// at pages' ends and do not keep up with a loop that computes.
POLYKV_INLINE void prefetch(const uint8_t* bytes) {
  _mm_prefetch(reinterpret_cast<const char*>(bytes), _MM_HINT_T0);
}

/// Levels of codes whose low four bits are in bytes and whose other bits are found by shifts.
template <uint32_t Bits>
struct Levels {
  static constexpr uint32_t kTables = Bits <= 4 ? 1 : 1U << (Bits - 4);
  __m256i tables[kTables];
  __m256i low_nibbles;

  POLYKV_INLINE Levels() : low_nibbles(_mm256_set1_epi8(15)) {
    const Codebook& book = codebook(Bits);
    for (uint32_t i = 0; i < kTables; ++i) {
      alignas(16) uint8_t table[16];
      for (uint32_t code = 0; code < 16; ++code)
        table[code] = static_cast<uint8_t>(book.levels[(i * 16 + code) % book.size] + kLevelBias);
      tables[i] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<__m128i*>(table)));
    }
  }
  POLYKV_INLINE __m256i low(__m256i x) const { return _mm256_and_si256(x, low_nibbles); }
  POLYKV_INLINE __m256i high(__m256i x) const { return low(_mm256_srli_epi16(x, 4)); }

  /// `upper`: bit 7 of each byte is the fifth bit of the code, bit 7 of upper2 the sixth.
  POLYKV_INLINE __m256i look_up(__m256i nibbles, __m256i upper, __m256i upper2) const {
    const __m256i first = _mm256_shuffle_epi8(tables[0], nibbles);
    if constexpr (Bits <= 4) {
      return first;
    } else {
      const __m256i below =
          _mm256_blendv_epi8(first, _mm256_shuffle_epi8(tables[1], nibbles), upper);
      if constexpr (Bits == 5) {
        return below;
      } else {
        const __m256i above = _mm256_blendv_epi8(_mm256_shuffle_epi8(tables[2], nibbles),
                                                 _mm256_shuffle_epi8(tables[3], nibbles), upper);
        return _mm256_blendv_epi8(below, above, upper2);
      }
    }
  }
};
template <>
struct Levels<8> {};

/// sums[row] += levels x the row's words: bytes of a lane 0 and 2 with the first, 1 and 3 with the
/// second.
template <uint32_t Rows>
POLYKV_INLINE void multiply(__m256i levels, const int32_t* const* words, uint32_t first_word,
                            __m256i* sums) {
  const __m256i even = _mm256_and_si256(levels, _mm256_set1_epi16(0xff));
  const __m256i odd = _mm256_srli_epi16(levels, 8);
#pragma GCC unroll 4
  for (uint32_t row = 0; row < Rows; ++row) {
    const __m256i evens = _mm256_madd_epi16(even, _mm256_set1_epi32(words[row][first_word]));
    const __m256i odds = _mm256_madd_epi16(odd, _mm256_set1_epi32(words[row][first_word + 1]));
    sums[row] = _mm256_add_epi32(sums[row], _mm256_add_epi32(evens, odds));
    // Keeps the compiler from reordering so far that it runs out of registers (a third slower).
    asm volatile("" : "+x"(sums[row]));
  }
}

/// Adds to sums[row] the products of 8 tokens, the first of them 8 * part.
template <uint32_t Bits, uint32_t Rows>
POLYKV_INLINE void key_products(const Levels<Bits>& levels, const uint8_t* codes, uint32_t dims,
                                uint32_t part, const int32_t* const* words, const uint8_t* ahead,
                                __m256i* sums) {
  ahead += size_t{part} * dims * Bits;
  if constexpr (Bits == 8) {
    const uint8_t* line = codes + part * 32;
    for (uint32_t word = 0; word < dims / 2; word += 2, line += 4 * kBlockTokens) {
      if (word % 4 == 0) prefetch(ahead + word * 16);
      multiply<Rows>(load(line), words, word, sums);
    }
  } else {
    const uint32_t group = part / 2 % 2;
    const uint8_t* piece = codes + k_line_offset(part * 8, 0, dims, Bits, 0);
    for (uint32_t word = 0; word < dims / 2; word += 8, piece += Bits * kPieceLineBytes) {
      for (uint32_t line = 0; line < (Bits + 3) / 4; ++line) prefetch(ahead + line * 64);
      ahead += Bits * 16;
      const uint8_t* low = piece + group * 2 * kPieceLineBytes;
      const __m256i lines[2] = {load(low), load(low + kPieceLineBytes)};
      __m256i upper = _mm256_setzero_si256();
      if constexpr (Bits > 4) {
        const uint32_t line = kPieceLowLines + (Bits == 6 ? group : 0);
        upper = load(piece + line * kPieceLineBytes);
        if (Bits == 5 && group == 0) upper = _mm256_slli_epi16(upper, 4);
      }
#pragma GCC unroll 4
      for (int quad = 0; quad < 4; ++quad) {
        const __m256i line = lines[quad / 2];
        const __m256i nibbles = quad % 2 == 0 ? levels.low(line) : levels.high(line);
        // The quad's bit, or two, to the top of the byte.
        const __m256i fifth = Bits == 5   ? _mm256_slli_epi16(upper, 3 - quad)
                              : Bits == 6 ? _mm256_slli_epi16(upper, 7 - 2 * quad)
                                          : upper;
        const __m256i sixth = Bits == 6 ? _mm256_slli_epi16(upper, 6 - 2 * quad) : upper;
        multiply<Rows>(levels.look_up(nibbles, fifth, sixth), words,
                       word + 2 * static_cast<uint32_t>(quad), sums);
      }
    }
  }
}

/// Outputs of `Halves` times 8 dims from `dim` on: out = out * factor + (products - bias) * scale.
template <uint32_t Bits, uint32_t Rows, uint32_t Halves>
POLYKV_INLINE void value_products(const Levels<Bits>& levels, const uint8_t* codes, uint32_t dims,
                                  uint32_t dim, const int32_t* const* weights, const uint8_t* ahead,
                                  __m256i (*sums)[Rows]) {
  const uint8_t* first = codes + size_t{dim} * 4;
  ahead += size_t{dim} * Bits * 8;
  const size_t plane_bytes = size_t{dims} * 4;
  if constexpr (Bits == 8) {
    for (uint32_t quad = 0; quad < kTokenQuads; ++quad, first += plane_bytes, ahead += 64) {
      prefetch(ahead);
      for (uint32_t half = 0; half < Halves; ++half) {
        const __m256i biased = _mm256_xor_si256(load(first + half * 32), _mm256_set1_epi8(-128));
        multiply<Rows>(biased, weights, 2 * quad, sums[half]);
      }
    }
    return;
  } else {
    for (uint32_t group = 0; group < kTokenQuads / kGroupQuads; ++group) {
      const uint32_t word = 2 * kGroupQuads * group;
      constexpr uint32_t kNibblePlanes = Bits == 3 ? kV3Planes : 4;
      __m256i extra[Halves];  // 5 bits: the fifth bits; 3 bits: the spare bits of the planes
      for (uint32_t half = 0; half < Halves; ++half) {
        extra[half] =
            Bits == 5 ? load(first + 4 * plane_bytes + half * 32) : _mm256_setzero_si256();
      }
#pragma GCC unroll 4
      for (uint32_t plane = 0; plane < kNibblePlanes; ++plane, ahead += 64) {
        prefetch(ahead);
#pragma GCC unroll 2
        for (uint32_t half = 0; half < Halves; ++half) {
          const __m256i x = load(first + plane * plane_bytes + half * 32);
          const int shift = static_cast<int>(2 * plane);
          const __m256i upper = extra[half];
          if constexpr (Bits == 3) {
            const __m256i spare = _mm256_and_si256(x, _mm256_set1_epi8(-0x78));  // 0x88
            extra[half] =
                _mm256_or_si256(extra[half], _mm256_srli_epi16(spare, 3 - static_cast<int>(plane)));
          }
          const __m256i low_upper = Bits == 5 ? _mm256_slli_epi16(upper, 7 - shift) : upper;
          const __m256i high_upper = Bits == 5 ? _mm256_slli_epi16(upper, 6 - shift) : upper;
          multiply<Rows>(levels.look_up(levels.low(x), low_upper, upper), weights, word + 4 * plane,
                         sums[half]);
          multiply<Rows>(levels.look_up(levels.high(x), high_upper, upper), weights,
                         word + 4 * plane + 2, sums[half]);
        }
      }
      if constexpr (Bits == 3) {
        for (uint32_t half = 0; half < Halves; ++half) {
          const __m256i x = extra[half];
          multiply<Rows>(levels.look_up(levels.low(x), x, x), weights, word + 12, sums[half]);
          multiply<Rows>(levels.look_up(levels.high(x), x, x), weights, word + 14, sums[half]);
        }
      }
      if constexpr (Bits == 5) {
        prefetch(ahead);
        ahead += 64;
      }
      first += Bits * plane_bytes;
    }
  }
}

/// A row's softmax weights of a block times the values' gains, as fixed-point numbers.
struct Weights {
  /// [token quad][tokens l and l + 16, l + 32 and l + 48], a pair of int16 each.
  alignas(32) int32_t words[kWeightWords];
  int32_t bias;
  float scale;   // of the products
  float factor;  // of what was accumulated before
};

POLYKV_INLINE __m256i fixed_point(const float* weights, __m256 factor) {
  const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(weights), factor));
  const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(weights + 8), factor));
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), _MM_SHUFFLE(3, 1, 2, 0));
}

/// weights: not negative, none above `most`, which is not zero.
POLYKV_INLINE void pack_weights(const float* weights, float most, Weights& out) {
  const __m256 factor = _mm256_set1_ps(kWeightLimit / most);
  __m256i tokens[4];
  __m256i sum = _mm256_setzero_si256();
  for (uint32_t i = 0; i < 4; ++i) {
    tokens[i] = fixed_point(weights + i * 16, factor);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(tokens[i], _mm256_set1_epi16(1)));
  }
  for (uint32_t half = 0; half < 2; ++half) {  // of the 128-bit lanes' 8 tokens each
    const auto side = [&](__m256i x, __m256i y) POLYKV_TARGET {
      return half == 0 ? _mm256_unpacklo_epi16(x, y) : _mm256_unpackhi_epi16(x, y);
    };
    const __m256i first = side(tokens[0], tokens[1]);
    const __m256i second = side(tokens[2], tokens[3]);
    const __m256i low = _mm256_unpacklo_epi32(first, second);  // quads 0, 1 and 8, 9, or from 4 on
    const __m256i high = _mm256_unpackhi_epi32(first, second);
    for (uint32_t i = 0; i < 2; ++i) {
      int32_t* words = out.words + half * 8 + i * 4;
      const __m256i quads = i == 0 ? low : high;
      _mm_store_si128(reinterpret_cast<__m128i*>(words), _mm256_castsi256_si128(quads));
      _mm_store_si128(reinterpret_cast<__m128i*>(words + 16), _mm256_extracti128_si256(quads, 1));
    }
  }
  alignas(32) int32_t sums[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(sums), sum);
  out.bias = 0;
  for (const int32_t part : sums) out.bias += part * kLevelBias;
  out.scale = most / kWeightLimit;
}

POLYKV_INLINE void load_gains(const uint8_t* halves, float* gains) {
  for (uint32_t i = 0; i < kBlockTokens; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i * 2));
    _mm256_store_ps(gains + i, _mm256_cvtph_ps(eight));
  }
}

/// scores[64] become fp32 logits. False: one is beyond fp32.
POLYKV_INLINE bool make_logits(const int32_t* products, const float* gains, const PackedQuery& row,
                               float soft_cap, float* scores) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (uint32_t i = 0; i < kBlockTokens; ++i) {
    const uint32_t product = static_cast<uint32_t>(products[i]) - static_cast<uint32_t>(row.bias);
    const auto dot = static_cast<float>(static_cast<int32_t>(product));
    scores[i] = dot * row.scale * gains[i] + row.mean_logit;
    uint32_t bits;
    __builtin_memcpy(&bits, &scores[i], sizeof bits);
    bits &= 0x7fffffffU;
    largest = bits > largest ? bits : largest;
  }
  // An infinity and every NaN are above all numbers.
  if (largest >= 0x7f800000U) return false;
  if (soft_cap > 0) {
#pragma omp simd
    for (uint32_t i = 0; i < kBlockTokens; ++i) {
      // tanh(x) = 1 - 2 / (exp(2 x) + 1)
      scores[i] = soft_cap - 2 * soft_cap / (exp_fast(2 * scores[i] / soft_cap) + 1);
    }
  }
  return true;
}

/// False where no token of the block has weight.
POLYKV_INLINE bool make_weights(float* scores, const float* gains, const PackedQuery& row,
                                Weights& out) {
  SoftmaxState& state = *row.state;
  if (row.unseen != 0) {
    if (row.unseen == ~uint64_t{0}) return false;
    for (uint32_t i = 0; i < kBlockTokens; ++i) {
      if ((row.unseen >> i & 1U) != 0) scores[i] = std::numeric_limits<float>::lowest();
    }
  }
  float maximum = state.maximum;
#pragma omp simd reduction(max : maximum)
  for (uint32_t i = 0; i < kBlockTokens; ++i) maximum = scores[i] > maximum ? scores[i] : maximum;
  float sum = 0;
  float most = 0;
#pragma omp simd reduction(+ : sum) reduction(max : most)
  for (uint32_t i = 0; i < kBlockTokens; ++i) {
    float weight = exp_fast(scores[i] - maximum);
    weight = scores[i] == std::numeric_limits<float>::lowest() ? 0.0F : weight;
    sum += weight;
    scores[i] = weight * gains[i];
    most = scores[i] > most ? scores[i] : most;
  }
  out.factor = state.sum > 0 ? exp_fast(state.maximum - maximum) : 0.0F;
  state.sum = state.sum * out.factor + sum;
  state.maximum = maximum;
  // Weights so small beside those of other blocks, or gains all zero, add nothing.
  if (most < 1e-30F) {
    std::memset(out.words, 0, sizeof out.words);
    out.bias = 0;
    out.scale = 0;
  } else {
    pack_weights(scores, most, out);
  }
  return true;
}

template <uint32_t Bits, uint32_t Rows>
POLYKV_TARGET void all_key_products(const PackedBlock& block, const PackedQuery* rows,
                                    int32_t (*products)[kBlockTokens]) {
  const Levels<Bits> levels;
  const int32_t* words[Rows];
  for (uint32_t row = 0; row < Rows; ++row) words[row] = rows[row].words;
  for (uint32_t part = 0; part < kBlockTokens / 8; ++part) {
    __m256i sums[Rows];
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    key_products<Bits, Rows>(levels, block.bytes + block.k.codes, block.k.head_dim, part, words,
                             block.ahead + block.k.codes, sums);
    for (uint32_t row = 0; row < Rows; ++row)
      _mm256_store_si256(reinterpret_cast<__m256i*>(products[row] + part * 8), sums[row]);
  }
}

template <uint32_t Bits, uint32_t Rows, uint32_t Halves>
POLYKV_INLINE void add_values(const Levels<Bits>& levels, const PackedBlock& block, uint32_t dim,
                              const PackedQuery* rows, const Weights* weights) {
  const int32_t* words[Rows];
  for (uint32_t row = 0; row < Rows; ++row) words[row] = weights[row].words;
  __m256i sums[Halves][Rows];
  for (auto& half : sums)
    for (__m256i& sum : half) sum = _mm256_setzero_si256();
  value_products<Bits, Rows, Halves>(levels, block.bytes + block.v.codes, block.v.head_dim, dim,
                                     words, block.ahead + block.v.codes, sums);
  for (uint32_t row = 0; row < Rows; ++row) {
    const __m256i bias = _mm256_set1_epi32(weights[row].bias);
    const __m256 scale = _mm256_set1_ps(weights[row].scale);
    const __m256 factor = _mm256_set1_ps(weights[row].factor);
    for (uint32_t half = 0; half < Halves; ++half) {
      float* output = rows[row].output + dim + half * 8;
      const __m256 sum = _mm256_cvtepi32_ps(_mm256_sub_epi32(sums[half][row], bias));
      const __m256 before = _mm256_mul_ps(_mm256_loadu_ps(output), factor);
      _mm256_storeu_ps(output, _mm256_fmadd_ps(sum, scale, before));
    }
  }
}

template <uint32_t Bits, uint32_t Rows>
POLYKV_TARGET void all_value_products(const PackedBlock& block, const PackedQuery* rows,
                                      const Weights* weights) {
  const Levels<Bits> levels;
  uint32_t dim = 0;
  constexpr uint32_t kHalves = Rows > 2 ? 1 : 2;
  for (; dim + kHalves * 8 <= block.v.head_dim; dim += kHalves * 8)
    add_values<Bits, Rows, kHalves>(levels, block, dim, rows, weights);
  for (; dim < block.v.head_dim; dim += 8)
    add_values<Bits, Rows, 1>(levels, block, dim, rows, weights);
}

template <uint32_t Rows>
POLYKV_TARGET bool attend_rows(const PackedBlock& block, const PackedQuery* rows) {
  alignas(32) int32_t products[Rows][kBlockTokens];
  switch (block.k.rule.bits) {
    case 4:
      all_key_products<4, Rows>(block, rows, products);
      break;
    case 5:
      all_key_products<5, Rows>(block, rows, products);
      break;
    case 6:
      all_key_products<6, Rows>(block, rows, products);
      break;
    default:
      all_key_products<8, Rows>(block, rows, products);
  }
  alignas(32) float k_gains[kBlockTokens];
  alignas(32) float v_gains[kBlockTokens];
  load_gains(block.bytes + block.k.gains, k_gains);
  load_gains(block.bytes + block.v.gains, v_gains);
  Weights weights[Rows];
  bool any = false;
  for (uint32_t row = 0; row < Rows; ++row) {
    alignas(32) float scores[kBlockTokens];
    if (!make_logits(products[row], k_gains, rows[row], block.soft_cap, scores)) return false;
    if (make_weights(scores, v_gains, rows[row], weights[row])) {
      any = true;
    } else {
      weights[row] = {{}, 0, 0, 1};
    }
  }
  if (!any) return true;
  switch (block.v.rule.bits) {
    case 3:
      all_value_products<3, Rows>(block, rows, weights);
      break;
    case 4:
      all_value_products<4, Rows>(block, rows, weights);
      break;
    case 5:
      all_value_products<5, Rows>(block, rows, weights);
      break;
    default:
      all_value_products<8, Rows>(block, rows, weights);
  }
  return true;
}

bool attend_block(const PackedBlock& block, const PackedQuery* rows, uint32_t row_count) {
  switch (row_count) {
    case 1:
      return attend_rows<1>(block, rows);
    case 2:
      return attend_rows<2>(block, rows);
    case 3:
      return attend_rows<3>(block, rows);
    default:
      return attend_rows<4>(block, rows);
  }
}

/// A word has a pair of int16: dims 0 and 2 of a dim quad, or 1 and 3.
void pack_query(const float* row, uint32_t k_head_dim, int32_t* words, PackedQuery* query) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (uint32_t i = 0; i < k_head_dim; ++i) {
    const float magnitude = row[i] < 0 ? -row[i] : row[i];
    largest = magnitude > largest ? magnitude : largest;
  }
  const float step = largest / query_limit(k_head_dim);
  const float factor = step > 0 ? 1 / step : 0;
  // Beside a step so small its inverse is no number any logit is zero.
  const bool is_zero = !(factor < std::numeric_limits<float>::max());
  int32_t sum = 0;
  for (uint32_t quad = 0; quad < k_head_dim / 4; ++quad) {
    int16_t numbers[4];
    for (uint32_t i = 0; i < 4; ++i) {
      const float number = is_zero ? 0 : row[quad * 4 + i] * factor;
      // Rounded: 1.5 * 2^23 leaves no room for a fraction.
      numbers[i] = static_cast<int16_t>(number + 12582912.0F - 12582912.0F);
      sum += numbers[i];
    }
    const int16_t pairs[4] = {numbers[0], numbers[2], numbers[1], numbers[3]};
    std::memcpy(words + size_t{quad} * 2, pairs, sizeof pairs);
  }
  query->words = words;
  query->scale = step;
  query->bias = sum * kLevelBias;
}

constexpr AttendOps kOps = {"avx2", pack_query, attend_block};

}  // namespace

const AttendOps* avx2_attend_ops() {
  return avx2_ops() == nullptr ? nullptr : &kOps;
}

}  // namespace polykv::cpu

#else

namespace polykv::cpu {
const AttendOps* avx2_attend_ops() {
  return nullptr;
}
}  // namespace polykv::cpu

#endif
