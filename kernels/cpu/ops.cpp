#include "kernels/cpu/ops.h"

#include <cstdlib>
#include <string_view>

namespace polykv::cpu {

const Ops& ops() {
  static const Ops& chosen = []() -> const Ops& {
    const char* choice = std::getenv("POLYKV_CPU");
    const bool baseline = choice != nullptr && std::string_view(choice) == "baseline";
    const Ops* wide = baseline ? nullptr : avx2_ops();
    return wide != nullptr ? *wide : baseline_ops();
  }();
  return chosen;
}

}  // namespace polykv::cpu
