// Attention of a few rows to one packed block. Each attend_*.cpp includes this once, inside an unnamed namespace, behind
// what its instruction set does differently:
//
//   POLYKV_TARGET, POLYKV_INLINE     attributes of functions
//   Vector, kWidth                   kWidth lanes of 32 bits
//   load, splat, bit_and, bit_or, bit_xor, shift_left, shift_right     of bytes; shifts of 16 bits
//   Levels<bits>                     what codes stand for, as bytes without a sign: level + kLevelBias
//   Words split(a, b, c, d)          four fixed-point numbers, for the bytes of a lane in their order, as two words
//   kWeightLimit, query_limit(dims)  the largest numbers
//   Sums, multiply<rows, vectors>    integer products of levels and words
//   kKeyVectors, value_vectors(rows) so many vectors of tokens (1 or 2) and of dims (1, 2 or 4) have sums at a time: as registers
//                                    allow, for a sum waits for its last product
//
// What the levels' bias adds to a sum of products is known from the sum of the other factors. Sums may wrap around on
// their way as long as they fit without it.

#include "kernels/cpu/exp_fast.inl"

constexpr float kRoundingUnit = 12582912.0F;  // 1.5 * 2^23: adding it leaves no room for a fraction

/// A row's softmax weights of a block times the values' gains, as fixed-point numbers.
struct Weights {
  alignas(64) int32_t words[2 * kTokenQuads];
  int32_t bias;
  float scale;   // of the products
  float factor;  // of what was accumulated before
};

/// weights: not negative, none above `most`, which is not zero.
POLYKV_INLINE void pack_weights(const float* weights, float most, Weights& out) {
  const float factor = kWeightLimit / most;
  alignas(64) int32_t numbers[kBlockTokens];
  int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (uint32_t i = 0; i < kBlockTokens; ++i) {
    numbers[i] = static_cast<int32_t>(weights[i] * factor + kRoundingUnit - kRoundingUnit);
    sum += numbers[i];
  }
#pragma omp simd
  for (uint32_t quad = 0; quad < kTokenQuads; ++quad) {
    const Words words = split(numbers[quad], numbers[quad + 32], numbers[quad + 16], numbers[quad + 48]);
    out.words[quad] = words.first;
    out.words[quad + kTokenQuads] = words.second;
  }
  out.bias = sum * kLevelBias;
  out.scale = most / kWeightLimit;
}

/// False for one that no encoder writes: negative, infinite or no number.
POLYKV_INLINE bool load_gains(const uint8_t* halves, float* gains) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (uint32_t i = 0; i < kBlockTokens; ++i) {
    uint16_t half;
    __builtin_memcpy(&half, halves + size_t{i} * 2, sizeof half);
    largest = half > largest ? half : largest;
  }
  for (uint32_t i = 0; i < kBlockTokens; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i * 2));
    _mm256_store_ps(gains + i, _mm256_cvtph_ps(eight));
  }
  return largest < 0x7c00U;
}

/// Products without their bias.
POLYKV_INLINE float unbiased(int32_t products, int32_t bias) {
  return static_cast<float>(
      static_cast<int32_t>(static_cast<uint32_t>(products) - static_cast<uint32_t>(bias)));
}

POLYKV_INLINE float tanh_fast(float x) {
  // Near zero the quotient would be the difference of two numbers close to 1.
  const float square = x * x;
  const float series =
      x + x * square * (-1.0F / 3 + square * (2.0F / 15 - square * (17.0F / 315)));
  const float quotient = 1 - 2 / (exp_fast(2 * x) + 1);
  return square < 0.0625F ? series : quotient;
}

/// scores[64] become fp32 logits. False: one that the row sees is beyond fp32.
POLYKV_INLINE bool make_logits(const int32_t* products, const float* gains, const PackedQuery& row,
                               float soft_cap, float* scores) {
#pragma omp simd
  for (uint32_t i = 0; i < kBlockTokens; ++i)
    scores[i] = unbiased(products[i], row.bias) * row.scale * gains[i] + row.mean_logit;
  if (row.unseen != 0) {
    for (uint32_t i = 0; i < kBlockTokens; ++i) {
      if ((row.unseen >> i & 1U) != 0) scores[i] = 0;
    }
  }
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (uint32_t i = 0; i < kBlockTokens; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, &scores[i], sizeof bits);
    bits &= 0x7fffffffU;
    largest = bits > largest ? bits : largest;
  }
  // An infinity and every NaN are above all numbers.
  if (largest >= 0x7f800000U) return false;
  if (soft_cap > 0) {
#pragma omp simd
    for (uint32_t i = 0; i < kBlockTokens; ++i)
      scores[i] = soft_cap * tanh_fast(scores[i] / soft_cap);
  }
  return true;
}

/// False where the row sees no token of the block.
POLYKV_INLINE bool make_weights(float* scores, const float* gains, const PackedQuery& row,
                                Weights& out) {
  constexpr float kUnseen = std::numeric_limits<float>::lowest();
  SoftmaxState& state = *row.state;
  if (row.unseen == ~uint64_t{0}) return false;
  if (row.unseen != 0) {
    for (uint32_t i = 0; i < kBlockTokens; ++i) {
      if ((row.unseen >> i & 1U) != 0) scores[i] = kUnseen;
    }
  }
  float maximum = state.maximum;
#pragma omp simd reduction(max : maximum)
  for (uint32_t i = 0; i < kBlockTokens; ++i) maximum = scores[i] > maximum ? scores[i] : maximum;
  float sum = 0;
  float most = 0;
#pragma omp simd reduction(+ : sum) reduction(max : most)
  for (uint32_t i = 0; i < kBlockTokens; ++i) {
    const float weight = scores[i] == kUnseen ? 0.0F : exp_fast(scores[i] - maximum);
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

/// Fetches what will be read some blocks later, a little at each step, so that memory is never idle and never has more to
/// fetch than it takes at once. The hardware's own prefetchers stop at pages' ends and do not keep up with a loop that
/// computes. In 256ths of a line.
class Fetcher {
 public:
  explicit POLYKV_INLINE Fetcher(const Ahead& ahead)
      : ahead_(ahead), end_(ahead.lines * kAheadStreams) {}

  /// For a step that reads so many bytes of its block: three quarters of that.
  POLYKV_INLINE void step(uint32_t bytes) { fetch(bytes * (256 / kLineBytes) * 3 / 4); }
  /// The other quarter, in so many parts.
  POLYKV_INLINE void pause(uint32_t parts) { fetch(end_ * 64 / parts); }
  POLYKV_INLINE void rest() { fetch(end_ * 256); }

 private:
  POLYKV_INLINE void fetch(uint32_t share) {
    due_ += share;
    const uint32_t stop = due_ / 256 < end_ ? due_ / 256 : end_;
    for (; next_ < stop; ++next_) {
      const uintptr_t line = ahead_.first + uintptr_t{next_ / kAheadStreams} * kLineBytes +
                             next_ % kAheadStreams * ahead_.apart_bytes;
      _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T0);
    }
  }

  const Ahead ahead_;
  const uint32_t end_;
  uint32_t next_ = 0;
  uint32_t due_ = 0;
};

/// Products of kKeyVectors * kWidth tokens, the first of them `token`.
template <uint32_t Bits, uint32_t Rows>
POLYKV_INLINE void key_products(const Levels<Bits>& levels, const uint8_t* codes, uint32_t dims,
                                uint32_t token, const int32_t* const* words, Fetcher& fetcher,
                                Sums (*sums)[Rows]) {
  constexpr uint32_t kVectorBytes = kWidth * 4;
  const uint32_t quads = dims / 4;
  if constexpr (Bits == 8) {
    const uint8_t* line = codes + size_t{token} * 4;
    for (uint32_t quad = 0; quad < quads; ++quad, line += 4 * kBlockTokens) {
      fetcher.step(kKeyVectors * kVectorBytes);
      Vector keys[kKeyVectors];
      for (uint32_t i = 0; i < kKeyVectors; ++i) keys[i] = load(line + i * kVectorBytes);
      multiply<Rows, kKeyVectors>(keys, words, quad, quads, sums);
    }
  } else {
    static_assert(kKeyVectors == 1 || kKeyVectors * kWidth == kPieceTokens);
    const uint32_t group = token % kPieceTokens / 16;
    const uint8_t* piece = codes + k_line_offset(token, 0, dims, Bits, 0);
    for (uint32_t quad = 0; quad < quads; quad += 4, piece += Bits * kPieceLineBytes) {
      fetcher.step(Bits * kKeyVectors * kWidth * 2);
      Vector lines[kKeyVectors][2];
      Vector upper[kKeyVectors];
#pragma GCC unroll 2
      for (uint32_t i = 0; i < kKeyVectors; ++i) {
        const uint8_t* low = piece + (group + i) * 2 * kPieceLineBytes;
        lines[i][0] = load(low);
        lines[i][1] = load(low + kPieceLineBytes);
        upper[i] = splat(0);
        if constexpr (Bits > 4)
          upper[i] = load(piece + (kPieceLowLines + (Bits == 6 ? group + i : 0)) * kPieceLineBytes);
        if (Bits == 5 && group == 1) upper[i] = shift_right(upper[i], 4);
      }
#pragma GCC unroll 4
      for (uint32_t j = 0; j < 4; ++j) {
        Vector keys[kKeyVectors];
#pragma GCC unroll 2
        for (uint32_t i = 0; i < kKeyVectors; ++i) {
          const Vector line = lines[i][j / 2];
          const auto bit = static_cast<int>(Bits == 6 ? 2 * j : 4 * i + j);
          keys[i] = j % 2 == 0 ? levels.low(line, upper[i], bit) : levels.high(line, upper[i], bit);
        }
        multiply<Rows, kKeyVectors>(keys, words, quad + j, quads, sums);
      }
    }
  }
}

template <uint32_t Bits, uint32_t Rows>
POLYKV_TARGET void multiply_keys(const PackedBlock& block, const PackedQuery* rows,
                                 Fetcher& fetcher, int32_t (*products)[kBlockTokens]) {
  const Levels<Bits> levels;
  const uint32_t dims = block.k.head_dim;
  const int32_t* words[Rows];
  for (uint32_t row = 0; row < Rows; ++row) words[row] = rows[row].words;
  for (uint32_t token = 0; token < kBlockTokens; token += kKeyVectors * kWidth) {
    Sums sums[kKeyVectors][Rows];
    key_products<Bits, Rows>(levels, block.bytes + block.k.codes, dims, token, words,
                             fetcher, sums);
    for (uint32_t i = 0; i < kKeyVectors; ++i) {
      for (uint32_t row = 0; row < Rows; ++row)
        sums[i][row].store(products[row] + token + i * kWidth);
    }
  }
}

/// A group of 8 token quads times `Vectors` vectors of dims. `planes`: at the first of these dims.
template <uint32_t Bits, uint32_t Rows, uint32_t Vectors>
POLYKV_INLINE void group_products(const Levels<Bits>& levels, const uint8_t* planes,
                                  size_t plane_bytes, const int32_t* const* words, uint32_t quad,
                                  Fetcher& fetcher, Sums (*sums)[Rows]) {
  constexpr uint32_t kNibblePlanes = Bits == 3 ? kV3Planes : 4;
  constexpr uint32_t kVectorBytes = kWidth * 4;
  Vector upper[Vectors];  // 5 bits: the fifth ones; 3 bits: the spare bits of the planes
  for (uint32_t i = 0; i < Vectors; ++i)
    upper[i] = Bits == 5 ? load(planes + 4 * plane_bytes + i * kVectorBytes) : splat(0);
  fetcher.step(Bits * Vectors * kVectorBytes);
  Vector low[Vectors];
  Vector high[Vectors];
#pragma GCC unroll 4
  for (uint32_t plane = 0; plane < kNibblePlanes; ++plane) {
    const int bit = static_cast<int>(2 * plane);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < Vectors; ++i) {
      const Vector x = load(planes + plane * plane_bytes + i * kVectorBytes);
      low[i] = levels.low(x, upper[i], bit);
      high[i] = levels.high(x, upper[i], bit + 1);
      if constexpr (Bits == 3)
        upper[i] = bit_or(upper[i], shift_right(bit_and(x, splat(0x88)), 3 - static_cast<int>(plane)));
    }
    multiply<Rows, Vectors>(low, words, quad + 2 * plane, kTokenQuads, sums);
    multiply<Rows, Vectors>(high, words, quad + 2 * plane + 1, kTokenQuads, sums);
  }
  if constexpr (Bits == 3) {
    for (uint32_t i = 0; i < Vectors; ++i) {
      low[i] = levels.low(upper[i], upper[i], 0);
      high[i] = levels.high(upper[i], upper[i], 0);
    }
    multiply<Rows, Vectors>(low, words, quad + 6, kTokenQuads, sums);
    multiply<Rows, Vectors>(high, words, quad + 7, kTokenQuads, sums);
  }
}

template <uint32_t Bits, uint32_t Rows, uint32_t Vectors>
POLYKV_INLINE void value_products(const Levels<Bits>& levels, const uint8_t* codes,
                                  size_t plane_bytes, const int32_t* const* words,
                                  Fetcher& fetcher, Sums (*sums)[Rows]) {
  constexpr uint32_t kVectorBytes = kWidth * 4;
  if constexpr (Bits == 8) {
    for (uint32_t quad = 0; quad < kTokenQuads; ++quad, codes += plane_bytes) {
      Vector values[Vectors];
      fetcher.step(Vectors * kVectorBytes);
      for (uint32_t i = 0; i < Vectors; ++i)
        values[i] = bit_xor(load(codes + i * kVectorBytes), splat(0x80));
      multiply<Rows, Vectors>(values, words, quad, kTokenQuads, sums);
    }
  } else {
    for (uint32_t quad = 0; quad < kTokenQuads; quad += kGroupQuads, codes += Bits * plane_bytes) {
      group_products<Bits, Rows, Vectors>(levels, codes, plane_bytes, words, quad, fetcher, sums);
    }
  }
}

template <uint32_t Bits, uint32_t Rows, uint32_t Vectors>
POLYKV_INLINE void add_values(const Levels<Bits>& levels, const PackedBlock& block, uint32_t dim,
                              const PackedQuery* rows, const Weights* weights,
                              Fetcher& fetcher) {
  const int32_t* words[Rows];
  for (uint32_t row = 0; row < Rows; ++row) words[row] = weights[row].words;
  Sums sums[Vectors][Rows];
  value_products<Bits, Rows, Vectors>(
      levels, block.bytes + block.v.codes + size_t{dim} * 4, size_t{block.v.head_dim} * 4, words,
      fetcher, sums);
  for (uint32_t row = 0; row < Rows; ++row) {
    const Weights& weight = weights[row];
    alignas(64) int32_t products[Vectors * kWidth];
    for (uint32_t i = 0; i < Vectors; ++i) sums[i][row].store(products + i * kWidth);
    float* output = rows[row].output + dim;
#pragma omp simd
    for (uint32_t i = 0; i < Vectors * kWidth; ++i)
      output[i] = output[i] * weight.factor + unbiased(products[i], weight.bias) * weight.scale;
  }
}

template <uint32_t Bits, uint32_t Rows>
POLYKV_TARGET void multiply_values(const PackedBlock& block, const PackedQuery* rows,
                                   const Weights* weights, Fetcher& fetcher) {
  const Levels<Bits> levels;
  const uint32_t dims = block.v.head_dim;
  constexpr uint32_t kVectors = value_vectors(Rows);
  uint32_t dim = 0;
  for (; dim + kVectors * kWidth <= dims; dim += kVectors * kWidth)
    add_values<Bits, Rows, kVectors>(levels, block, dim, rows, weights, fetcher);
  // What is left has half as many at a time, and then a half of those.
  if constexpr (kVectors > 2) {
    if (dim + 2 * kWidth <= dims) {
      add_values<Bits, Rows, 2>(levels, block, dim, rows, weights, fetcher);
      dim += 2 * kWidth;
    }
  }
  if (kVectors > 1 && dim < dims) add_values<Bits, Rows, 1>(levels, block, dim, rows, weights, fetcher);
}

template <uint32_t Rows>
POLYKV_TARGET bool attend_rows(const PackedBlock& block, const PackedQuery* rows) {
  Fetcher fetcher(block.ahead);
  alignas(64) int32_t products[Rows][kBlockTokens];
  switch (block.k.rule.bits) {
    case 4:
      multiply_keys<4, Rows>(block, rows, fetcher, products);
      break;
    case 5:
      multiply_keys<5, Rows>(block, rows, fetcher, products);
      break;
    case 6:
      multiply_keys<6, Rows>(block, rows, fetcher, products);
      break;
    default:
      multiply_keys<8, Rows>(block, rows, fetcher, products);
  }
  alignas(64) float k_gains[kBlockTokens];
  alignas(64) float v_gains[kBlockTokens];
  if (!load_gains(block.bytes + block.k.gains, k_gains) ||
      !load_gains(block.bytes + block.v.gains, v_gains))
    return false;
  Weights weights[Rows];
  for (uint32_t row = 0; row < Rows; ++row) {
    fetcher.pause(Rows);
    alignas(64) float scores[kBlockTokens];
    if (!make_logits(products[row], k_gains, rows[row], block.soft_cap, scores)) return false;
    if (!make_weights(scores, v_gains, rows[row], weights[row])) weights[row] = {{}, 0, 0, 1};
  }
  switch (block.v.rule.bits) {
    case 3:
      multiply_values<3, Rows>(block, rows, weights, fetcher);
      break;
    case 4:
      multiply_values<4, Rows>(block, rows, weights, fetcher);
      break;
    case 5:
      multiply_values<5, Rows>(block, rows, weights, fetcher);
      break;
    default:
      multiply_values<8, Rows>(block, rows, weights, fetcher);
  }
  fetcher.rest();
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

/// The words: the first ones of all dim quads, then the second ones.
POLYKV_TARGET void pack_query(const float* row, uint32_t k_head_dim, int32_t* words, PackedQuery* query) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (uint32_t i = 0; i < k_head_dim; ++i) {
    const float magnitude = row[i] < 0 ? -row[i] : row[i];
    largest = magnitude > largest ? magnitude : largest;
  }
  const float step = largest / query_limit(k_head_dim);
  const float factor = largest > 0 ? 1 / step : 0;
  int32_t sum = 0;
  const uint32_t quads = k_head_dim / 4;
#pragma omp simd reduction(+ : sum)
  for (uint32_t quad = 0; quad < quads; ++quad) {
    int32_t numbers[4];
    for (uint32_t i = 0; i < 4; ++i) {
      numbers[i] = static_cast<int32_t>(row[quad * 4 + i] * factor + kRoundingUnit - kRoundingUnit);
      sum += numbers[i];
    }
    const Words four = split(numbers[0], numbers[1], numbers[2], numbers[3]);
    words[quad] = four.first;
    words[quad + quads] = four.second;
  }
  query->words = words;
  query->scale = step;
  query->bias = sum * kLevelBias;
}
