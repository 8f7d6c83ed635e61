// Computed K and V of a token range into a segment, layer by layer, on several threads.
#pragma once

#include <cstdint>

#include "common/result.h"
#include "daemon/prefill/transformer/kv_cache.h"
#include "daemon/prefill/transformer/last_queries.h"
#include "libclient/publisher.h"

namespace polykv {

/// Before the publisher's next segment, of token_count tokens, is begun: measures how its layers are
/// best encoded. `cache` holds the tokens at their positions in the document, and `queries` ends
/// with the last of them. The first error of any layer.
Status examine_segment(lib::Publisher& publisher, const KvCache& cache, const LastQueries& queries,
                       uint64_t token_count, uint32_t thread_count);

/// `cache` as above. The first error of any layer.
Status encode_segment(lib::OpenSegment& segment, const KvCache& cache, uint32_t thread_count);

}  // namespace polykv
