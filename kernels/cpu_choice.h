// What the environment variable POLYKV_CPU says. Read once; thread-safe.
#pragma once

namespace polykv {

/// Each holds back what stands above it.
enum class CpuChoice {
  widest,     // whatever this machine has; the variable is not set, or unknown
  avx2,       // no AVX-512
  baseline,   // what every machine of this architecture has
  reference,  // the slow, obvious implementation
};
CpuChoice cpu_choice();
/// What the variable says when that is none of these, else null.
const char* unknown_cpu_choice();

}  // namespace polykv
