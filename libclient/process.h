// Which side of a fork() are we on? A handle remembers the generation it was made in and compares.
#pragma once

#include <cstdint>

#include "common/result.h"

namespace polykv::lib {

/// Grows in each child of a fork(). Thread-safe, a load.
uint64_t process_generation();

/// POLYKV_ERR_FORKED when `generation` is not this process's. `operation` begins the message.
Status check_same_process(uint64_t generation, const char* operation);

}  // namespace polykv::lib
