// What happens to rows between matrix products, one implementation per instruction set.
#pragma once

#include <cstddef>

namespace polykv {

/// Pure functions on fp32 rows; thread-safe.
struct RowKernels {
  const char* name;

  /// out = x / sqrt(mean(x^2) + epsilon) * weight. out may be x.
  void (*rms_norm)(const float* x, const float* weight, float epsilon, size_t length, float* out);

  /// RoPE, half rotation, in place: (x[i], x[i + half]) turns by the angle of cosine[i], sine[i].
  void (*rotate_half)(float* x, const float* cosine, const float* sine, size_t half);

  /// out = gate / (1 + exp(-gate)) * up. out may be gate or up.
  void (*silu_multiply)(const float* gate, const float* up, size_t length, float* out);
};

/// The best for this processor; decided once.
const RowKernels& row_kernels();

extern const RowKernels kRowKernelsPortable;
#if defined(__x86_64__)
extern const RowKernels kRowKernelsAvx2;
#endif

}  // namespace polykv
