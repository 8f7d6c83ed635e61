// The KV cache of one sequence in device memory, fp32, laid out as KvCache is:
//
//   K of a layer: [kv_head, token, head_dim] with room for capacity_tokens, behind it V of the layer
#pragma once

#include <cstdint>

#include "daemon/prefill/transformer/device_memory.h"
#include "daemon/prefill/transformer/forward.h"

namespace polykv {

/// Not thread-safe; copy_layer_to_host() may be called by several threads while nothing else is.
class DeviceKvCache {
 public:
  static Result<DeviceKvCache> create(const DevicePlace& place, const ModelConfig& config,
                                      uint32_t capacity_tokens);

  const CacheShape& shape() const { return shape_; }
  uint32_t token_count() const { return shape_.token_count; }
  /// Truncates, or declares tokens that the caller has copied in.
  void set_token_count(uint32_t token_count);

  /// Device pointers.
  float* k(uint32_t layer) const { return data() + 2 * layer * layer_floats(); }
  float* v(uint32_t layer) const { return k(layer) + layer_floats(); }
  size_t token_stride() const { return shape_.head_dim; }                                  // floats
  size_t head_stride() const { return size_t{shape_.capacity_tokens} * shape_.head_dim; }  // floats

  /// K and V of tokens [first, first + count) from and to host memory, dense: [kv_head, token, head_dim]. What torch was
  /// given to do is done first.
  Status copy_layer_to_host(uint32_t layer, uint32_t first, uint32_t count, float* k,
                            float* v) const;
  Status copy_layer_from_host(uint32_t layer, uint32_t first, uint32_t count, const float* k,
                              const float* v);

 private:
  DeviceKvCache() = default;
  template <typename Copy>
  Status for_each_head(uint32_t first, uint32_t count, const Copy& copy) const;
  float* data() const { return static_cast<float*>(memory_.pointer()); }
  size_t layer_floats() const { return shape_.kv_head_count * head_stride(); }

  DevicePlace place_;
  CacheShape shape_;
  DeviceMemory memory_;
};

}  // namespace polykv
