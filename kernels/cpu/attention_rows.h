// What attention does with fp32 rows, one implementation per instruction set: for the packed tokens of a segment and for a
// model's own cache.
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

/// Pure functions on fp32 rows without infinities and NaN (see the kernels' compiler flags); thread-safe.
struct AttentionRows {
  const char* name;

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

/// The widest that this machine runs; POLYKV_CPU as for the codecs. Decided once.
const AttentionRows& attention_rows();

extern const AttentionRows kAttentionRowsPortable;
#if defined(__x86_64__)
extern const AttentionRows kAttentionRowsAvx2;
#endif

}  // namespace polykv
