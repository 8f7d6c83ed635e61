#include "kernels/cpu/ops.h"

#include "kernels/cpu_choice.h"

namespace polykv::cpu {

const Ops& ops() {
  static const Ops& chosen = []() -> const Ops& {
    if (cpu_choice() == CpuChoice::baseline) return baseline_ops();
    const Ops* wide = cpu_choice() == CpuChoice::avx2 ? nullptr : avx512_ops();
    if (wide == nullptr) wide = avx2_ops();
    return wide != nullptr ? *wide : baseline_ops();
  }();
  return chosen;
}

}  // namespace polykv::cpu
