// A model's weights as fp32, in one region of memory: filled from a GGUF, or a mapping of a weights
// cache file that all agents of a user share. No torch: the transformer wraps these pointers in
// tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/model/model.h"

namespace polykv {

/// Where each tensor lies in the region, in floats from its start; every one is 64-byte aligned. A
/// pure function of the configuration, so the file needs no table of its own.
struct WeightsLayout {
  struct Layer {
    uint64_t attn_norm = 0;  // [embedding]
    uint64_t qkv =
        0;  // [(heads + 2 kv_heads) * head_dim, embedding]: Q, then K, then V; half rotation
    uint64_t attn_output = 0;  // [embedding, heads * head_dim]
    uint64_t ffn_norm = 0;     // [embedding]
    uint64_t gate_up = 0;      // [2 * feed_forward, embedding]: gate, then up
    uint64_t down = 0;         // [embedding, feed_forward]
  };
  uint64_t token_embedding = 0;  // [vocab, embedding]
  uint64_t output_norm = 0;      // [embedding]
  uint64_t output = 0;           // [vocab, embedding]; equals token_embedding when tied
  std::vector<Layer> layers;
  uint64_t value_count = 0;  // size of the region
};
WeightsLayout weights_layout(const ModelConfig& config, bool tied_output);

/// Immutable; thread-safe; movable.
class Weights {
 public:
  /// Dequantises the whole model with `thread_count` threads, and takes the fingerprint over the
  /// very bytes that it dequantised. `progress` (may be empty) is called from the calling thread
  /// with bytes done and in all, and cancels with false (POLYKV_ERR_CANCELLED). Needs 4 bytes per
  /// parameter: see weights_bytes().
  using Progress = std::function<bool(uint64_t bytes_done, uint64_t bytes_total)>;
  static Result<Weights> load(const Model& model, uint32_t thread_count,
                              const Progress& progress = {});

  /// Maps a cache file read-only and shared. It must belong to this user, be private to them (0600)
  /// and fit `model`'s configuration; POLYKV_ERR_NOT_FOUND: there is none; POLYKV_ERR_CORRUPT: it
  /// is not one, or of another model or version. With `verify` the whole file's checksum is
  /// compared (0.1 s for 540 MB), else header and size only.
  static Result<Weights> open_cache(const std::string& path, const ModelConfig& config,
                                    bool verify = false);
  /// Writes a cache file, under a temporary name first; an existing one is replaced at once. Mode
  /// 0600.
  Status save_cache(const std::string& path) const;

  const ModelConfig& config() const { return config_; }
  const WeightsLayout& layout() const { return layout_; }
  const Digest& fingerprint() const { return fingerprint_; }
  const float* data() const { return data_; }  // layout().value_count floats
  /// Reads one byte of each page, so that a later measurement does not pay for page faults.
  void touch() const;

 private:
  Weights() = default;
  ModelConfig config_;
  WeightsLayout layout_;
  bool tied_output_ = false;
  Digest fingerprint_{};
  std::shared_ptr<void> region_;  // unmaps
  const float* data_ = nullptr;
};

/// 4 bytes per parameter: what load() will allocate.
uint64_t weights_bytes(const ModelConfig& config, bool tied_output);

}  // namespace polykv
