// The Llama architecture's tensors in a GGUF: which there must be and of which shape.
#pragma once

#include <vector>

#include "common/result.h"
#include "daemon/prefill/model/gguf.h"
#include "daemon/prefill/model/model_config.h"

namespace polykv {

/// Pointers into the GgufFile. A matrix is [out, in] row-major. Rows of attn_q and attn_k are in
/// the file's order, which is permuted for interleaved RoPE (Weights puts them back).
struct LlamaTensors {
  struct Layer {
    const TensorInfo* attn_norm = nullptr;    // [embedding]
    const TensorInfo* attn_q = nullptr;       // [heads * head_dim, embedding]
    const TensorInfo* attn_k = nullptr;       // [kv_heads * head_dim, embedding]
    const TensorInfo* attn_v = nullptr;       // [kv_heads * head_dim, embedding]
    const TensorInfo* attn_output = nullptr;  // [embedding, heads * head_dim]
    const TensorInfo* ffn_norm = nullptr;     // [embedding]
    const TensorInfo* ffn_gate = nullptr;     // [feed_forward, embedding]
    const TensorInfo* ffn_up = nullptr;       // [feed_forward, embedding]
    const TensorInfo* ffn_down = nullptr;     // [embedding, feed_forward]
  };
  const TensorInfo* token_embedding = nullptr;  // [vocab, embedding]
  const TensorInfo* output_norm = nullptr;      // [embedding]
  const TensorInfo* output = nullptr;  // [vocab, embedding]; nullptr: tied to token_embedding
  std::vector<Layer> layers;
};

/// A missing tensor or a wrong shape is POLYKV_ERR_MODEL_FORMAT. A tensor that this list does not
/// know is POLYKV_ERR_MODEL_UNSUPPORTED: to ignore it would compute something else than the model.
Result<LlamaTensors> find_llama_tensors(const GgufFile& gguf, const ModelConfig& config);

}  // namespace polykv
