// The loops of RowKernels, written so that the compiler turns them into vector code. Each row_kernels_*.cpp includes this
// once, inside an unnamed namespace, and is compiled for its instruction set; nothing here may be an inline function of a
// header, or the linker could give portable code an AVX2 body.

#include "kernels/cpu/exp_fast.inl"

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
