// Large private memory for weights and KV caches.
#pragma once

#include <cstdint>
#include <memory>

#include "common/result.h"

namespace polykv {

/// Zeroed private memory of a multiple of 2 MiB, aligned to 2 MiB, advised to use huge pages. Pages
/// come when they are first touched. `what` names it in the error (POLYKV_ERR_NO_MEMORY). The last
/// owner unmaps it.
Result<std::shared_ptr<void>> allocate_region(uint64_t size_bytes, const char* what);

}  // namespace polykv
