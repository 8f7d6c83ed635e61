// The loops of RowKernels, written so that the compiler turns them into vector code. Each row_kernels_*.cpp includes this
// once, inside an unnamed namespace, and is compiled for its instruction set; nothing here may be an inline function of a
// header, or the linker could give portable code an AVX2 body.

// exp(x) for x <= 88 within 2 ulp: x = n ln2 + r, |r| <= ln2 / 2, a polynomial for exp(r), n into the exponent. Below -87
// it stays at exp(-87), 1.6e-38, which is as good as zero beside a sum that is at least 1.
inline float exp_fast(float x) {
  constexpr float kLog2e = 1.44269504F;
  constexpr float kLn2High = 0.693359375F;
  constexpr float kLn2Low = -2.12194440e-4F;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  x = x < -87.0F ? -87.0F : x;
  x = x > 88.0F ? 88.0F : x;
  const float shifted = x * kLog2e + kRound;
  const float n = shifted - kRound;
  float r = x - n * kLn2High;
  r = r - n * kLn2Low;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  int bits;
  __builtin_memcpy(&bits, &shifted, sizeof bits);
  bits = static_cast<int>(static_cast<unsigned>(bits) << 23) + 0x3f800000;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return p * power;
}

void rms_norm(const float* x, const float* weight, float epsilon, size_t length, float* out) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (size_t i = 0; i < length; ++i) sum += x[i] * x[i];
  const float factor = 1.0F / __builtin_sqrtf(sum / static_cast<float>(length) + epsilon);
#pragma omp simd
  for (size_t i = 0; i < length; ++i) out[i] = x[i] * factor * weight[i];
}

void rotate_half(float* x, const float* cosine, const float* sine, size_t half) {
#pragma omp simd
  for (size_t i = 0; i < half; ++i) {
    const float a = x[i];
    const float b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

void silu_multiply(const float* gate, const float* up, size_t length, float* out) {
#pragma omp simd
  for (size_t i = 0; i < length; ++i) out[i] = gate[i] / (1.0F + exp_fast(-gate[i])) * up[i];
}

float softmax_block(float* scores, size_t valid, size_t count, SoftmaxState* state) {
  float maximum = state->maximum;
#pragma omp simd reduction(max : maximum)
  for (size_t i = 0; i < valid; ++i) maximum = scores[i] > maximum ? scores[i] : maximum;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (size_t i = 0; i < valid; ++i) {
    const float weight = exp_fast(scores[i] - maximum);
    scores[i] = weight;
    sum += weight;
  }
  for (size_t i = valid; i < count; ++i) scores[i] = 0;
  // Without an earlier key there is nothing to rescale.
  const float factor = state->sum > 0 ? exp_fast(state->maximum - maximum) : 0.0F;
  state->sum = state->sum * factor + sum;
  state->maximum = maximum;
  return factor;
}

void scale(const float* x, float factor, size_t length, float* out) {
#pragma omp simd
  for (size_t i = 0; i < length; ++i) out[i] = x[i] * factor;
}

void add_scaled(const float* x, float factor, size_t length, float* out) {
#pragma omp simd
  for (size_t i = 0; i < length; ++i) out[i] += x[i] * factor;
}

void few_scores(const float* q, size_t rows, const float* keys, size_t count, size_t dim, float* scores) {
  for (size_t i = 0; i < count; ++i) {
    const float* key = keys + i * dim;
    for (size_t row = 0; row < rows; ++row) {
      const float* query = q + row * dim;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (size_t d = 0; d < dim; ++d) sum += query[d] * key[d];
      scores[row * count + i] = sum;
    }
  }
}

void few_outputs(const float* weights, size_t rows, const float* values, size_t count, size_t dim, float* out) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t row = 0; row < rows; ++row) add_scaled(values + i * dim, weights[row * count + i], dim, out + row * dim);
  }
}
