// Runs once what libtorch, its BLAS and OpenMP do lazily: they read /proc and /sys at their first
// use, which the sandbox refuses afterwards.
#pragma once

#include <cstdint>

namespace polykv {

/// Sets the number of threads of the whole process and starts them. Once, before the sandbox.
void warm_up(uint32_t thread_count);

}  // namespace polykv
