// The AVX-512 paths in plain code, where POLYKV_EMULATE_AVX512 is defined (see CMakeLists.txt).
#pragma once

#include "kernels/cpu/attend_ops.h"
#include "kernels/cpu/ops.h"

namespace polykv::cpu {

/// Null where this machine has no AVX2, which the rest of them is.
const Ops* emulated_avx512_ops();
const AttendOps* emulated_avx512_attend_ops();

}  // namespace polykv::cpu
