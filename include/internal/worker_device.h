// What polykv-prefill computes with: a word of polykvd's configuration, and of its settings for the worker on the wire.
#pragma once

#include <cstdint>

namespace polykv {

/// automatic: a GPU where libtorch has CUDA and there is one, else the processor.
enum class WorkerDevice : uint8_t { automatic = 0, cpu = 1, cuda = 2 };

}  // namespace polykv
