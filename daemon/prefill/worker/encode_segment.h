// Computed K and V of a token range into an open segment, layer by layer, on several threads.
#pragma once

#include <cstdint>

#include "common/result.h"
#include "daemon/prefill/transformer/kv_cache.h"
#include "libclient/publisher.h"

namespace polykv {

/// `cache` holds the segment's tokens at their positions in the document. The first error of any
/// layer.
Status encode_segment(lib::OpenSegment& segment, const KvCache& cache, uint32_t thread_count);

}  // namespace polykv
