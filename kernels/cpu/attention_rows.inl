// The loops of AttentionRows, written so that the compiler turns them into vector code. Each attention_rows_*.cpp includes
// this once, inside an unnamed namespace, and is compiled for its instruction set; nothing here may be an inline function
// of a header, or the linker could give portable code an AVX2 body.

#include "kernels/cpu/exp_fast.inl"

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
