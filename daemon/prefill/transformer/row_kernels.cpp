#include "daemon/prefill/transformer/row_kernels.h"

namespace polykv {

const RowKernels& row_kernels() {
#if defined(__x86_64__)
  static const bool kHasAvx2 =
      __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  if (kHasAvx2) return kRowKernelsAvx2;
#endif
  return kRowKernelsPortable;
}

}  // namespace polykv
