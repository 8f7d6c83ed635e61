#include "daemon/prefill/transformer/kv_cache.h"

#include <cassert>
#include <cinttypes>

#include "daemon/prefill/model/memory_region.h"

namespace polykv {

uint64_t KvCache::size_bytes(const ModelConfig& config, uint32_t capacity_tokens) {
  return uint64_t{2} * sizeof(float) * config.layer_count * config.kv_head_count * config.head_dim *
         capacity_tokens;
}

Result<KvCache> KvCache::create(const ModelConfig& config, uint32_t capacity_tokens) {
  if (capacity_tokens == 0 || capacity_tokens > kMaxTokens) {
    return {POLYKV_ERR_INVALID_ARGUMENT, format("create a KV cache: %u tokens; give 1 to %" PRIu64,
                                                capacity_tokens, kMaxTokens)};
  }
  KvCache cache;
  cache.layer_count_ = config.layer_count;
  cache.kv_head_count_ = config.kv_head_count;
  cache.head_dim_ = config.head_dim;
  cache.capacity_tokens_ = capacity_tokens;
  POLYKV_ASSIGN_OR_RETURN(cache.region_,
                          allocate_region(size_bytes(config, capacity_tokens), "the KV cache"));
  cache.data_ = static_cast<float*>(cache.region_.get());
  return cache;
}

void KvCache::set_token_count(uint32_t token_count) {
  assert(token_count <= capacity_tokens_);
  token_count_ = token_count;
}

}  // namespace polykv
