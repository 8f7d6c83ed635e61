#include "kernels/cpu/ops_includes.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#define POLYKV_TARGET __attribute__((target("avx2,fma,f16c")))
#define POLYKV_AVX2 1
#define POLYKV_OPS_NAME "avx2"
#define POLYKV_DECODE_BLOCK decode_block_rows

namespace polykv::cpu {

namespace {
#include "kernels/cpu/ops_decode.inl"
#include "kernels/cpu/ops_impl.inl"
#include "kernels/cpu/ops_rotated.inl"
#include "kernels/cpu/ops_rotated_encode.inl"
#include "kernels/cpu/ops_table.inl"

bool has_f16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
}  // namespace

const Ops* avx2_ops() {
  // The built-in also asks whether the kernel saves the wide registers.
  static const bool usable =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  return usable ? &kOps : nullptr;
}

}  // namespace polykv::cpu

#else

namespace polykv::cpu {
const Ops* avx2_ops() {
  return nullptr;
}
}  // namespace polykv::cpu

#endif
