// The KV cache of one sequence in fp32, K after RoPE in the half-rotation layout.
//
//   K of a layer: [kv_head, token, head_dim], token stride head_dim, head stride capacity *
//   head_dim (in floats) V of a layer: the same
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/result.h"
#include "daemon/prefill/model/model_config.h"
#include "daemon/prefill/transformer/forward.h"

namespace polykv {

/// Owns its memory (an anonymous mapping, huge pages where the kernel gives them; untouched tokens
/// cost nothing). Others may fill it: write tokens 0..n-1 of all layers, then set_token_count(n).
/// Not thread-safe.
class KvCache {
 public:
  /// POLYKV_ERR_NO_MEMORY with the size when the mapping fails.
  static Result<KvCache> create(const ModelConfig& config, uint32_t capacity_tokens);
  static uint64_t size_bytes(const ModelConfig& config, uint32_t capacity_tokens);

  uint32_t layer_count() const { return layer_count_; }
  uint32_t kv_head_count() const { return kv_head_count_; }
  uint32_t head_dim() const { return head_dim_; }
  uint32_t capacity_tokens() const { return capacity_tokens_; }
  uint32_t token_count() const { return token_count_; }
  CacheShape shape() const {
    return {layer_count_, kv_head_count_, head_dim_, capacity_tokens_, token_count_};
  }
  /// Truncates, or declares tokens that the caller has written itself. At most capacity_tokens().
  void set_token_count(uint32_t token_count);

  float* k(uint32_t layer) { return data_ + 2 * layer * layer_stride(); }
  float* v(uint32_t layer) { return k(layer) + layer_stride(); }
  const float* k(uint32_t layer) const { return data_ + 2 * layer * layer_stride(); }
  const float* v(uint32_t layer) const { return k(layer) + layer_stride(); }
  size_t token_stride() const { return head_dim_; }                            // floats
  size_t head_stride() const { return size_t{capacity_tokens_} * head_dim_; }  // floats

 private:
  KvCache() = default;
  size_t layer_stride() const { return kv_head_count_ * head_stride(); }

  uint32_t layer_count_ = 0;
  uint32_t kv_head_count_ = 0;
  uint32_t head_dim_ = 0;
  uint32_t capacity_tokens_ = 0;
  uint32_t token_count_ = 0;
  std::shared_ptr<void> region_;  // unmaps
  float* data_ = nullptr;
};

}  // namespace polykv
