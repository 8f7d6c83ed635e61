#include "daemon/prefill/model/fingerprint.h"

#include <algorithm>
#include <numeric>

#include "common/digest.h"

namespace polykv {

namespace {

void hash_config(Hasher& hasher, const ModelConfig& config) {
  hasher.update(config.architecture);
  hasher.update_u32(config.layer_count)
      .update_u32(config.head_count)
      .update_u32(config.kv_head_count);
  hasher.update_u32(config.head_dim).update_u32(config.embedding_length);
  hasher.update_u32(config.feed_forward_length).update_u32(config.context_length);
  hasher.update_u32(config.vocab_size).update_f64(config.rms_epsilon);
  const RopeParameters& rope = config.rope;
  hasher.update_u32(static_cast<uint32_t>(rope.kind))
      .update_u32(static_cast<uint32_t>(rope.scaling));
  hasher.update_u32(rope.rotary_dim).update_f64(rope.theta).update_f64(rope.scaling_factor);
  hasher.update_u32(rope.original_context);
}

}  // namespace

Digest config_digest(const ModelConfig& config) {
  Hasher hasher;
  hasher.update("polykv configuration 1");
  hash_config(hasher, config);
  return hasher.finish();
}

Digest combine_fingerprint(const Model& model, std::span<const Digest> tensor_digests) {
  const std::vector<TensorInfo>& tensors = model.gguf().tensors();
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return tensors[a].name < tensors[b].name; });
  Hasher hasher;
  hasher.update("polykv model 1");
  hash_config(hasher, model.config());
  hasher.update_u64(tensors.size());
  for (const size_t i : order) {
    hasher.update(tensors[i].name).update(tensor_type_name(tensors[i].type));
    for (const uint64_t dimension : tensors[i].dimensions) hasher.update_u64(dimension);
    hasher.update(std::span(tensor_digests[i]));
  }
  return hasher.finish();
}

Result<Digest> read_and_hash_tensor(
    const FileSource& file, const TensorInfo& tensor,
    const std::function<void(uint64_t, uint64_t, std::span<const uint8_t>)>& consume) {
  static constexpr uint64_t kPieceBytes = uint64_t{1} << 20;
  const uint64_t row_count = tensor.value_count / tensor.dimensions[0];
  const uint64_t row_bytes = tensor.size_bytes / row_count;
  const uint64_t piece_rows = std::clamp<uint64_t>(kPieceBytes / row_bytes, 1, row_count);
  std::vector<uint8_t> piece(piece_rows * row_bytes);
  Hasher hasher;
  for (uint64_t row = 0; row < row_count; row += piece_rows) {
    const uint64_t rows = std::min(piece_rows, row_count - row);
    const auto bytes = std::span(piece).first(rows * row_bytes);
    POLYKV_RETURN_IF_ERROR(file.read(tensor.offset_bytes + row * row_bytes, bytes));
    hasher.update(std::span<const uint8_t>(bytes));
    if (consume) consume(row, rows, bytes);
  }
  return hasher.finish();
}

Result<Digest> model_fingerprint(const Model& model) {
  std::vector<Digest> digests;
  digests.reserve(model.gguf().tensors().size());
  for (const TensorInfo& tensor : model.gguf().tensors()) {
    POLYKV_ASSIGN_OR_RETURN(Digest digest, read_and_hash_tensor(model.file(), tensor, {}));
    digests.push_back(digest);
  }
  return combine_fingerprint(model, digests);
}

}  // namespace polykv
