#include "daemon/prefill/transformer/device_kv_cache.h"

#include <cassert>
#include <cinttypes>

#include "daemon/prefill/transformer/kv_cache.h"

namespace polykv {

Result<DeviceKvCache> DeviceKvCache::create(const DevicePlace& place, const ModelConfig& config,
                                            uint32_t capacity_tokens) {
  if (capacity_tokens == 0 || capacity_tokens > kMaxTokens) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("create a KV cache on the device: %u tokens; give 1 to %" PRIu64,
                   capacity_tokens, kMaxTokens)};
  }
  DeviceKvCache cache;
  cache.place_ = place;
  cache.shape_ = {config.layer_count, config.kv_head_count, config.head_dim, capacity_tokens, 0};
  POLYKV_ASSIGN_OR_RETURN(
      cache.memory_,
      DeviceMemory::allocate(place, KvCache::size_bytes(config, capacity_tokens), "the KV cache"));
  return cache;
}

void DeviceKvCache::set_token_count(uint32_t token_count) {
  assert(token_count <= shape_.capacity_tokens);
  shape_.token_count = token_count;
}

/// copy(where a kv_head's first token is in a layer's K or V, where it is in dense ones, bytes)
template <typename Copy>
Status DeviceKvCache::for_each_head(uint32_t first, uint32_t count, const Copy& copy) const {
  assert(uint64_t{first} + count <= shape_.capacity_tokens);
  POLYKV_RETURN_IF_ERROR(place_.runtime->use_device(place_.index));
  POLYKV_RETURN_IF_ERROR(place_.runtime->synchronize_stream(nullptr));
  const size_t floats = size_t{count} * shape_.head_dim;
  for (uint32_t head = 0; head < shape_.kv_head_count; ++head) {
    POLYKV_RETURN_IF_ERROR(
        copy(head * head_stride() + first * token_stride(), head * floats, floats * sizeof(float)));
  }
  return Status::ok();
}

Status DeviceKvCache::copy_layer_to_host(uint32_t layer, uint32_t first, uint32_t count, float* k,
                                         float* v) const {
  return for_each_head(first, count, [&](size_t at, size_t dense, size_t bytes) {
    POLYKV_RETURN_IF_ERROR(place_.runtime->copy_to_host(k + dense, this->k(layer) + at, bytes));
    return place_.runtime->copy_to_host(v + dense, this->v(layer) + at, bytes);
  });
}

Status DeviceKvCache::copy_layer_from_host(uint32_t layer, uint32_t first, uint32_t count,
                                           const float* k, const float* v) {
  return for_each_head(first, count, [&](size_t at, size_t dense, size_t bytes) {
    POLYKV_RETURN_IF_ERROR(place_.runtime->copy_to_device(this->k(layer) + at, k + dense, bytes));
    return place_.runtime->copy_to_device(this->v(layer) + at, v + dense, bytes);
  });
}

}  // namespace polykv
