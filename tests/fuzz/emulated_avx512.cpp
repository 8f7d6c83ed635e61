// Linked in place of kernels/cpu/ops.cpp: everything encodes and decodes by AVX-512 in plain code.
#include "tests/fuzz/emulated_avx512.h"

namespace polykv::cpu {

const Ops& ops() {
  // What is not AVX-512 in it is AVX2.
  const Ops* emulated = emulated_avx512_ops();
  return emulated != nullptr ? *emulated : baseline_ops();
}

}  // namespace polykv::cpu
