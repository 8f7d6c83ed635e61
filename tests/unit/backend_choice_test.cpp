// Run with POLYKV_CPU unset, and with each of its values and one that is none (tests/unit/CMakeLists.txt).
#include <catch2/catch.hpp>
#include <cstdlib>
#include <string>

#include "kernels/codec.h"
#include "kernels/cpu/attend_ops.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu_choice.h"

using namespace polykv;

TEST_CASE("POLYKV_CPU chooses the backend and holds back the instruction set") {
  const char* variable = std::getenv("POLYKV_CPU");
  const std::string choice = variable == nullptr ? "" : variable;
  CHECK(active_backend() == (choice == "reference" ? Backend::reference : Backend::cpu));
  CHECK(codec_for(Profile::k8v8) == codec_for(Profile::k8v8, active_backend()));
  CHECK(codec_for(Profile::k8v8, Backend::cpu) != codec_for(Profile::k8v8, Backend::reference));
  const bool plain = choice == "baseline" || cpu::avx2_ops() == nullptr;
  const cpu::Ops* wide = choice == "avx2" ? nullptr : cpu::avx512_ops();
  if (wide == nullptr) wide = cpu::avx2_ops();
  CHECK(&cpu::ops() == (plain ? &cpu::baseline_ops() : wide));
  const cpu::AttendOps* attend = choice == "avx2" ? nullptr : cpu::avx512_attend_ops();
  if (attend == nullptr) attend = cpu::avx2_attend_ops();
  CHECK(cpu::attend_ops() == (plain ? nullptr : attend));
  CHECK((unknown_cpu_choice() != nullptr) == (choice == "avx9"));
}
