// Which BLAS the dynamic linker gave to libtorch, and how its threads wait.
#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>

#include "daemon/prefill/transformer/transformer.h"

namespace polykv {

void wait_passively(char** argv) {
  static constexpr const char* kVariable = "OMP_WAIT_POLICY";
  if (getenv(kVariable) != nullptr || setenv(kVariable, "passive", 1) != 0) return;
  execv("/proc/self/exe", argv);
  // No /proc: the program goes on, and its threads spin.
}

BlasInfo blas_info() {
  BlasInfo info;
  info.remedy = "install libopenblas0-openmp and make it the alternative of libblas.so.3";
  void* sgemm = dlsym(RTLD_DEFAULT, "sgemm_");
  Dl_info where{};
  if (sgemm == nullptr || dladdr(sgemm, &where) == 0 || where.dli_fname == nullptr) {
    info.description = "unknown";
    return info;
  }
  // Debian's OpenBLAS gives BLAS's names from a thin library of its own folder, behind the
  // alternative libblas.so.3.
  char resolved[PATH_MAX];
  info.description = realpath(where.dli_fname, resolved) != nullptr ? resolved : where.dli_fname;
  if (info.description.find("/libtorch_cpu.so") != std::string::npos) {
    // pip's torch has one within itself, and no alternative of the system's is asked.
    info.description = "libtorch's own (" + info.description + ")";
    info.is_good = true;
    info.remedy.clear();
    return info;
  }
  using ConfigFunction = char*();
  using ParallelFunction = int();
  const auto config = reinterpret_cast<ConfigFunction*>(dlsym(RTLD_DEFAULT, "openblas_get_config"));
  const auto parallel =
      reinterpret_cast<ParallelFunction*>(dlsym(RTLD_DEFAULT, "openblas_get_parallel"));
  // An OpenBLAS may be loaded (LAPACK's alternative) without being the one that sgemm_ comes from.
  const bool is_openblas = info.description.find("openblas") != std::string::npos;
  if (!is_openblas || config == nullptr || parallel == nullptr) return info;
  static constexpr const char* kThreads[] = {"one thread", "its own threads", "OpenMP threads"};
  const int kind = parallel();
  info.description = std::string(config()) + ", " +
                     (kind >= 0 && kind <= 2 ? kThreads[kind] : "unknown threads") + " (" +
                     info.description + ")";
  info.is_good = kind == 2;
  if (info.is_good) info.remedy.clear();
  return info;
}

}  // namespace polykv
