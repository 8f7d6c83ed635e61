// What happens to rows between matrix products, one implementation per instruction set.
#pragma once

#include <cstddef>
#include <limits>

namespace polykv {

/// The running softmax of one query: exp(score - maximum) is summed over the keys seen so far.
struct SoftmaxState {
  float maximum =
      std::numeric_limits<float>::lowest();  // no infinity: see the kernels' compiler flags
  float sum = 0;
};

/// Pure functions on fp32 rows; thread-safe.
struct RowKernels {
  const char* name;

  /// out = x / sqrt(mean(x^2) + epsilon) * weight. out may be x.
  void (*rms_norm)(const float* x, const float* weight, float epsilon, size_t length, float* out);

  /// RoPE, half rotation, in place: (x[i], x[i + half]) turns by the angle of cosine[i], sine[i].
  void (*rotate_half)(float* x, const float* cosine, const float* sine, size_t half);

  /// out = gate / (1 + exp(-gate)) * up. out may be gate or up.
  void (*silu_multiply)(const float* gate, const float* up, size_t length, float* out);

  /// One block of keys: scores[0..valid) become exp(score - new maximum), scores[valid..count)
  /// become 0, and the state takes them in. Returns exp(old maximum - new maximum), by which what
  /// was accumulated before is to be multiplied.
  float (*softmax_block)(float* scores, size_t valid, size_t count, SoftmaxState* state);

  /// out = x * factor. out may be x.
  void (*scale)(const float* x, float factor, size_t length, float* out);

  /// out += x * factor.
  void (*add_scaled)(const float* x, float factor, size_t length, float* out);

  /// For few rows, where a matrix product would copy the keys first: scores[row, key] = q[row] . keys[key],
  /// all dense, of `dim` floats.
  void (*few_scores)(const float* q, size_t rows, const float* keys, size_t count, size_t dim,
                     float* scores);
  /// out[row] += sum over keys of weights[row, key] * values[key].
  void (*few_outputs)(const float* weights, size_t rows, const float* values, size_t count,
                      size_t dim, float* out);
};

/// The best for this processor; decided once.
const RowKernels& row_kernels();

extern const RowKernels kRowKernelsPortable;
#if defined(__x86_64__)
extern const RowKernels kRowKernelsAvx2;
#endif

}  // namespace polykv
