#include "kernels/cpu/ops_includes.h"

#define POLYKV_TARGET
#define POLYKV_AVX2 0
#define POLYKV_OPS_NAME "baseline"
#define POLYKV_DECODE_BLOCK nullptr

namespace polykv::cpu {

namespace {
#include "kernels/cpu/ops_impl.inl"
#include "kernels/cpu/ops_rotated.inl"
#include "kernels/cpu/ops_rotated_encode.inl"
#include "kernels/cpu/ops_table.inl"
}  // namespace

const Ops& baseline_ops() {
  return kOps;
}

}  // namespace polykv::cpu
