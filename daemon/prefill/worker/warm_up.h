// Runs once what libraries do lazily and the sandbox refuses afterwards.
#pragma once

#include <cstdint>

namespace polykv {

/// Sets the number of threads of the whole process and starts them. Once, before the sandbox.
void warm_up(uint32_t thread_count);

}  // namespace polykv
