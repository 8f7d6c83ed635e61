#include "daemon/prefill/transformer/torch_failure.h"

#include <algorithm>
#include <array>

namespace polykv {

namespace {

template <size_t count>
bool has_any(std::string_view text, const std::array<std::string_view, count>& words) {
  return std::any_of(words.begin(), words.end(), [&](std::string_view word) {
    return text.find(word) != std::string_view::npos;
  });
}

// Before the others, whose words they have as well. cuBLAS takes a workspace of its own; the driver takes memory for
// kernels, streams and channels.
constexpr std::array<std::string_view, 5> kOutOfMemory = {
    "CUDA out of memory", "CUDA error: out of memory", "CUDA driver error: out of memory",
    "STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation"};

constexpr std::array<std::string_view, 4> kLost = {"CUDA error", "CUDA driver", "CUBLAS_STATUS",
                                                   "cuda runtime error"};

}  // namespace

polykv_status torch_failure_code(std::string_view text) {
  if (has_any(text, kOutOfMemory)) return POLYKV_ERR_NO_MEMORY;
  return has_any(text, kLost) ? POLYKV_ERR_DEVICE_LOST : POLYKV_ERR_INTERNAL;
}

}  // namespace polykv
