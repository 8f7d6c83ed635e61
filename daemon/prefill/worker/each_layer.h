// Layers of a segment on several threads.
#pragma once

#include <cstdint>
#include <functional>

#include "common/result.h"

namespace polykv {

/// Calls action(layer, thread) for each layer once; thread: 0 .. thread_count - 1, of which no two are at work at once.
/// The first error of any layer.
Status for_each_layer(uint32_t layer_count, uint32_t thread_count,
                      const std::function<Status(uint32_t layer, uint32_t thread)>& action);

}  // namespace polykv
