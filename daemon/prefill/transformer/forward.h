// What a forward pass is asked for, whichever of the two computes it: on the processor (transformer.h) or on a device
// (device_transformer.h).
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "common/result.h"
#include "daemon/prefill/model/model_config.h"
#include "daemon/prefill/transformer/prefix.h"

namespace polykv {

/// Q, K and V of a chunk's rows in one layer, in the middle of a forward(). Borrowed.
struct LayerRows {
  uint32_t layer = 0;
  uint32_t first_position = 0;  // of the first row
  size_t row_count = 0;
  size_t stride = 0;   // floats between two rows
  float* q = nullptr;  // [row, head * head_dim]
  float* k = nullptr;  // [row, kv_head * head_dim]
  float* v = nullptr;  // [row, kv_head * head_dim]
};

struct ForwardOptions {
  uint32_t chunk_tokens =
      512;  // rows that go through a layer together; results do not depend on it beyond rounding
  /// After each chunk: tokens in the cache by now, of this call's end. false cancels:
  /// POLYKV_ERR_CANCELLED, and the cache keeps the chunks that are done.
  std::function<bool(uint32_t tokens_done, uint32_t tokens_total)> progress;
  /// Between two layers of a chunk, for whoever must show signs of life on a slow machine. false
  /// cancels, and the cache keeps the chunks that are done.
  std::function<bool()> between_layers;
  /// Tokens in front of the cache's, which then holds what follows them; null: none. Borrowed.
  const Prefix* prefix = nullptr;
  /// In each layer of each chunk, before the rotation and behind it. May change the rows; what the
  /// cache holds was changed before the rotation.
  std::function<void(const LayerRows&)> before_rope;
  std::function<void(const LayerRows&)> after_rope;
};

/// What a prefill allocates, before it starts. The caller compares it with its limit.
struct MemoryEstimate {
  uint64_t weights_bytes = 0;
  uint64_t kv_cache_bytes = 0;
  uint64_t scratch_bytes = 0;
  uint64_t total_bytes() const { return weights_bytes + kv_cache_bytes + scratch_bytes; }
};
/// Of a KV cache, wherever it is.
struct CacheShape {
  uint32_t layer_count = 0;
  uint32_t kv_head_count = 0;
  uint32_t head_dim = 0;
  uint32_t capacity_tokens = 0;
  uint32_t token_count = 0;
};

/// What forward() refuses before it computes anything; logit_count: 0, or floats to be written.
Status check_forward(const ModelConfig& config, std::span<const uint32_t> ids, size_t logit_count,
                     const CacheShape& cache, const ForwardOptions& options);

/// POLYKV_ERR_CANCELLED.
Status forward_cancelled(uint32_t tokens_in_cache);

}  // namespace polykv
