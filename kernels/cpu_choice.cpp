#include "kernels/cpu_choice.h"

#include <cstdlib>
#include <optional>
#include <string_view>

namespace polykv {

namespace {

const char* variable() {
  static const char* const value = std::getenv("POLYKV_CPU");
  return value;
}

std::optional<CpuChoice> parsed() {
  if (variable() == nullptr) return CpuChoice::widest;
  const std::string_view name = variable();
  if (name.empty()) return CpuChoice::widest;
  if (name == "avx2") return CpuChoice::avx2;
  if (name == "baseline") return CpuChoice::baseline;
  if (name == "reference") return CpuChoice::reference;
  return std::nullopt;
}

}  // namespace

CpuChoice cpu_choice() {
  static const CpuChoice choice = parsed().value_or(CpuChoice::widest);
  return choice;
}

const char* unknown_cpu_choice() {
  return parsed().has_value() ? nullptr : variable();
}

}  // namespace polykv
