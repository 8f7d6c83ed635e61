#include "daemon/prefill/model/llama_tensors.h"

#include <cinttypes>
#include <unordered_set>

namespace polykv {

namespace {

class Finder {
 public:
  explicit Finder(const GgufFile& gguf) : gguf_(gguf) {}

  /// The tensor [rows, columns], or a vector [columns] when rows is 0. Keeps the first error.
  const TensorInfo* find(const std::string& name, uint64_t rows, uint64_t columns) {
    const TensorInfo* tensor = gguf_.tensor(name);
    if (tensor == nullptr) {
      fail(POLYKV_ERR_MODEL_FORMAT, "tensor " + quoted(name) + " is missing",
           "the file is damaged or incomplete, fetch it again");
      return nullptr;
    }
    const bool fits = tensor->dimensions[0] == columns &&
                      tensor->dimensions[1] == (rows == 0 ? 1 : rows) &&
                      tensor->dimensions[2] == 1 && tensor->dimensions[3] == 1;
    if (!fits) {
      fail(POLYKV_ERR_MODEL_FORMAT,
           format("tensor %s has dimensions %" PRIu64 " x %" PRIu64 " x %" PRIu64 " x %" PRIu64
                  ", the configuration asks for %" PRIu64 " x %" PRIu64,
                  quoted(name).c_str(), tensor->dimensions[0], tensor->dimensions[1],
                  tensor->dimensions[2], tensor->dimensions[3], columns, rows == 0 ? 1 : rows),
           "the file is damaged, fetch it again");
    }
    known_.insert(tensor);
    return tensor;
  }

  void check_that_all_are_known() {
    for (const TensorInfo& tensor : gguf_.tensors()) {
      if (known_.contains(&tensor)) continue;
      fail(POLYKV_ERR_MODEL_UNSUPPORTED,
           "tensor " + quoted(tensor.name) +
               " is not part of the Llama architecture as polykv computes it",
           "use a model without it (biases, experts and RoPE factors are not supported)");
    }
  }

  const Status& status() const { return status_; }

 private:
  void fail(polykv_status code, const std::string& cause, const std::string& remedy) {
    if (!status_.is_ok()) return;
    status_ = {code, "read model " + quoted(gguf_.name()) + ": " + cause + "; " + remedy};
  }

  const GgufFile& gguf_;
  std::unordered_set<const TensorInfo*> known_;
  Status status_;
};

}  // namespace

Result<LlamaTensors> find_llama_tensors(const GgufFile& gguf, const ModelConfig& config) {
  Finder finder(gguf);
  const uint64_t embedding = config.embedding_length;
  const uint64_t hidden = config.feed_forward_length;
  const uint64_t q_rows = uint64_t{config.head_count} * config.head_dim;
  const uint64_t kv_rows = uint64_t{config.kv_head_count} * config.head_dim;
  LlamaTensors tensors;
  tensors.token_embedding = finder.find("token_embd.weight", config.vocab_size, embedding);
  tensors.output_norm = finder.find("output_norm.weight", 0, embedding);
  if (gguf.tensor("output.weight") != nullptr) {
    tensors.output = finder.find("output.weight", config.vocab_size, embedding);
  }
  for (uint32_t i = 0; i < config.layer_count && finder.status().is_ok(); ++i) {
    const std::string prefix = format("blk.%u.", i);
    LlamaTensors::Layer layer;
    layer.attn_norm = finder.find(prefix + "attn_norm.weight", 0, embedding);
    layer.attn_q = finder.find(prefix + "attn_q.weight", q_rows, embedding);
    layer.attn_k = finder.find(prefix + "attn_k.weight", kv_rows, embedding);
    layer.attn_v = finder.find(prefix + "attn_v.weight", kv_rows, embedding);
    layer.attn_output = finder.find(prefix + "attn_output.weight", embedding, q_rows);
    layer.ffn_norm = finder.find(prefix + "ffn_norm.weight", 0, embedding);
    layer.ffn_gate = finder.find(prefix + "ffn_gate.weight", hidden, embedding);
    layer.ffn_up = finder.find(prefix + "ffn_up.weight", hidden, embedding);
    layer.ffn_down = finder.find(prefix + "ffn_down.weight", embedding, hidden);
    tensors.layers.push_back(layer);
  }
  finder.check_that_all_are_known();
  POLYKV_RETURN_IF_ERROR(finder.status());
  return tensors;
}

}  // namespace polykv
