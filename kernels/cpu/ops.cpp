#include "kernels/cpu/ops.h"

#include "kernels/cpu_choice.h"

namespace polykv::cpu {

const Ops& ops() {
  static const Ops& chosen = []() -> const Ops& {
    const Ops* wide = cpu_choice() == CpuChoice::baseline ? nullptr : avx2_ops();
    return wide != nullptr ? *wide : baseline_ops();
  }();
  return chosen;
}

}  // namespace polykv::cpu
