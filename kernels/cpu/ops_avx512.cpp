// Compiled a second time for tests, with POLYKV_EMULATE_AVX512: then what is AVX-512 below is plain
// code, and the rest AVX2.
#include "kernels/cpu/ops_includes.h"

#if defined(__x86_64__)

#include <immintrin.h>

#ifdef POLYKV_EMULATE_AVX512
#include "kernels/cpu/avx512_emulation.h"
#define POLYKV_TARGET
#define POLYKV_INLINE inline
#define POLYKV_OPS_NAME "avx512 emulated"
#else
#define POLYKV_TARGET \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))
#define POLYKV_INLINE POLYKV_TARGET inline __attribute__((always_inline))
#define POLYKV_OPS_NAME "avx512"
#endif
#define POLYKV_AVX2 1
#define POLYKV_DECODE_BLOCK decode_block_rows

namespace polykv::cpu {

namespace {
#include "kernels/cpu/ops_decode_avx512.inl"
#include "kernels/cpu/ops_impl.inl"
#include "kernels/cpu/ops_rotated.inl"
#include "kernels/cpu/ops_rotated_encode_avx512.inl"
#include "kernels/cpu/ops_table.inl"
}  // namespace

#ifdef POLYKV_EMULATE_AVX512

const Ops* emulated_avx512_ops() {
  return avx2_ops() != nullptr ? &kOps : nullptr;
}

#else

const Ops* avx512_ops() {
  // The built-in also asks whether the kernel saves the wide registers.
  static const bool usable =
      avx2_ops() != nullptr && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi");
  return usable ? &kOps : nullptr;
}

#endif

}  // namespace polykv::cpu

#else

namespace polykv::cpu {
const Ops* avx512_ops() {
  return nullptr;
}
}  // namespace polykv::cpu

#endif
