// The Llama architecture in fp32 on a GPU: the same model as Transformer, with weights and KV cache in device memory. This
// header needs no torch.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/model/weights.h"
#include "daemon/prefill/transformer/device_kv_cache.h"
#include "daemon/prefill/transformer/forward.h"

namespace polykv {

class TensorPass;

struct DevicePassSettings {
  /// Rows of Q that after_rope is shown in each layer of each chunk: its last ones.
  uint32_t query_rows = 0;
  /// Logits of attention that exist at a time, at least those of one query: 256 MiB.
  uint64_t tile_logits = uint64_t{1} << 26;
  /// Of the weights at a time, between two calls of `progress`.
  uint64_t upload_bytes = uint64_t{64} << 20;
};

/// One thread at a time.
class DeviceTransformer {
 public:
  /// Copies the weights to the device; the host's are not needed afterwards. A big model on a slow link takes long:
  /// `progress` is called meanwhile, and ends it (POLYKV_ERR_CANCELLED) by returning false.
  static Result<std::unique_ptr<DeviceTransformer>> create(const Weights& weights,
                                                           const DevicePlace& place,
                                                           const DevicePassSettings& settings = {},
                                                           const Weights::Progress& progress = {});
  DeviceTransformer(const DeviceTransformer&) = delete;
  DeviceTransformer& operator=(const DeviceTransformer&) = delete;
  ~DeviceTransformer();

  const ModelConfig& config() const { return config_; }
  const DevicePlace& place() const { return place_; }

  /// As Transformer::forward(), with these differences: there is no prefix that lives elsewhere and no before_rope, and
  /// after_rope is shown copies of the chunk's last rows, of Q alone. Errors beyond those: NO_MEMORY (of the device),
  /// DEVICE_LOST. The cache has all that it says when it returns.
  Status forward(std::span<const uint32_t> ids, DeviceKvCache& cache, std::span<float> logits,
                 const ForwardOptions& options = {});

 private:
  DeviceTransformer(const Weights& weights, const DevicePlace& place,
                    const DevicePassSettings& settings);
  Status upload(const Weights& weights, const Weights::Progress& progress);
  Status run_chunk(std::span<const uint32_t> ids, DeviceKvCache& cache, uint32_t wanted_rows,
                   const ForwardOptions& options);
  Status show_queries(uint32_t layer, uint32_t first_position, uint32_t row_count,
                      const ForwardOptions& options);

  ModelConfig config_;
  DevicePlace place_;
  DevicePassSettings settings_;
  std::vector<float> inverse_frequency_;
  DeviceMemory weights_;
  std::unique_ptr<TensorPass> pass_;  // views weights_
  std::vector<float> cosine_;
  std::vector<float> sine_;
  std::vector<float> queries_;  // [query_rows, head, head_dim]
};

/// What a prefill allocates on the device, before it starts.
MemoryEstimate estimate_device_memory(const ModelConfig& config, bool tied_output,
                                      uint32_t token_count, uint32_t chunk_tokens,
                                      const DevicePassSettings& settings = {});

}  // namespace polykv
