// What a model is, whatever file it came from: sizes, RoPE, limits. Filled from a GGUF here; the
// architecture's own rules (which tensors, which shapes) are in llama_tensors.h.
#pragma once

#include <cstdint>
#include <string>

#include "common/result.h"
#include "daemon/prefill/model/gguf.h"
#include "include/internal/geometry.h"

namespace polykv {

/// Every field is within the limits below; sizes computed from them fit in 64 bits.
struct ModelConfig {
  std::string architecture;  // "llama"
  std::string name;          // general.name, for people; may be empty
  uint32_t layer_count = 0;
  uint32_t head_count = 0;  // a multiple of kv_head_count
  uint32_t kv_head_count = 0;
  uint32_t head_dim = 0;  // of Q, K and V; even
  uint32_t embedding_length = 0;
  uint32_t feed_forward_length = 0;
  uint32_t context_length = 0;  // tokens
  uint32_t vocab_size = 0;
  double rms_epsilon = 0;
  RopeParameters rope;  // as polykv stores K: half rotation, whatever order the file's rows have

  uint32_t group_size() const {
    return head_count / kv_head_count;
  }  // query heads that share a kv_head
};

struct ModelLimits {
  static constexpr uint32_t kEmbeddingLength = 1u << 16;
  static constexpr uint32_t kFeedForwardLength = 1u << 20;
  static constexpr uint32_t kHeadCount = 1u << 12;
  static constexpr uint32_t kVocabSize = 1u << 22;
};

/// POLYKV_ERR_MODEL_UNSUPPORTED: another architecture, or a feature of this one that polykv does
/// not compute (experts, RoPE scaling other than linear, ...). POLYKV_ERR_MODEL_FORMAT: fields that
/// are missing or contradict each other.
Result<ModelConfig> model_config_from_gguf(const GgufFile& gguf);

/// The identity of K and V that polykv computes with this model: fp32, K in the half-rotation
/// layout.
ModelIdentity model_identity(const ModelConfig& config, const Digest& fingerprint);

}  // namespace polykv
