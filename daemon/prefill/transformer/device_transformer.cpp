#include "daemon/prefill/transformer/device_transformer.h"

#include <algorithm>
#include <cassert>

#include "daemon/prefill/transformer/kv_cache.h"
#include "daemon/prefill/transformer/rope.h"
#include "daemon/prefill/transformer/tensor_pass.h"

namespace polykv {

namespace {

PassModel pass_model(const ModelConfig& config, const WeightsLayout& layout, const float* weights,
                     uint64_t tile_logits) {
  PassModel model;
  model.head_count = config.head_count;
  model.kv_head_count = config.kv_head_count;
  model.head_dim = config.head_dim;
  model.embedding_length = config.embedding_length;
  model.feed_forward_length = config.feed_forward_length;
  model.vocab_size = config.vocab_size;
  model.rms_epsilon = config.rms_epsilon;
  model.token_embedding = weights + layout.token_embedding;
  model.output_norm = weights + layout.output_norm;
  model.output = weights + layout.output;
  for (const WeightsLayout::Layer& layer : layout.layers) {
    model.layers.push_back({weights + layer.attn_norm, weights + layer.qkv,
                            weights + layer.attn_output, weights + layer.ffn_norm,
                            weights + layer.gate_up, weights + layer.down});
  }
  model.tile_logits = static_cast<int64_t>(tile_logits);
  return model;
}

}  // namespace

DeviceTransformer::DeviceTransformer(const Weights& weights, const DevicePlace& place,
                                     const DevicePassSettings& settings)
    : config_(weights.config()),
      place_(place),
      settings_(settings),
      inverse_frequency_(rope_frequencies(config_)) {}

DeviceTransformer::~DeviceTransformer() = default;

Result<std::unique_ptr<DeviceTransformer>> DeviceTransformer::create(
    const Weights& weights, const DevicePlace& place, const DevicePassSettings& settings,
    const Weights::Progress& progress) {
  std::unique_ptr<DeviceTransformer> result(new DeviceTransformer(weights, place, settings));
  POLYKV_RETURN_IF_ERROR(result->upload(weights, progress));
  PassModel model =
      pass_model(result->config_, weights.layout(),
                 static_cast<const float*>(result->weights_.pointer()), settings.tile_logits);
  POLYKV_ASSIGN_OR_RETURN(result->pass_, TensorPass::create(place.torch, std::move(model)));
  return result;
}

Status DeviceTransformer::upload(const Weights& weights, const Weights::Progress& progress) {
  const uint64_t bytes = weights.layout().value_count * sizeof(float);
  POLYKV_ASSIGN_OR_RETURN(weights_, DeviceMemory::allocate(place_, bytes, "the model's weights"));
  const auto* source = reinterpret_cast<const uint8_t*>(weights.data());
  auto* target = static_cast<uint8_t*>(weights_.pointer());
  for (uint64_t done = 0; done < bytes; done += settings_.upload_bytes) {
    if (progress && !progress(done, bytes))
      return {POLYKV_ERR_CANCELLED, "copy the model's weights to the GPU: cancelled"};
    POLYKV_RETURN_IF_ERROR(place_.runtime->copy_to_device(
        target + done, source + done, std::min(settings_.upload_bytes, bytes - done)));
  }
  return Status::ok();
}

Status DeviceTransformer::show_queries(uint32_t layer, uint32_t first_position, uint32_t row_count,
                                       const ForwardOptions& options) {
  const uint32_t shown = std::min(row_count, settings_.query_rows);
  if (!options.after_rope || shown == 0) return Status::ok();
  const size_t row_floats = size_t{config_.head_count} * config_.head_dim;
  queries_.resize(settings_.query_rows * row_floats);
  POLYKV_RETURN_IF_ERROR(pass_->copy_queries(shown, queries_.data()));
  options.after_rope({layer, first_position + row_count - shown, shown, row_floats, queries_.data(),
                      nullptr, nullptr});
  return Status::ok();
}

/// K and V of all rows go into the cache. Above the last layer's K and V only the last `wanted_rows` are computed.
Status DeviceTransformer::run_chunk(std::span<const uint32_t> ids, DeviceKvCache& cache,
                                    uint32_t wanted_rows, const ForwardOptions& options) {
  const auto row_count = static_cast<uint32_t>(ids.size());
  const uint32_t first_key = cache.token_count();
  const size_t half = config_.head_dim / 2;
  cosine_.resize(row_count * half);
  sine_.resize(row_count * half);
  rope_angles(inverse_frequency_, first_key, row_count, cosine_.data(), sine_.data());
  const std::vector<int64_t> wide_ids(ids.begin(), ids.end());
  POLYKV_RETURN_IF_ERROR(
      pass_->begin_chunk(wide_ids.data(), row_count, cosine_.data(), sine_.data()));
  for (uint32_t i = 0; i < config_.layer_count; ++i) {
    if (options.between_layers && !options.between_layers()) return forward_cancelled(first_key);
    const PassCache layer = {cache.k(i), cache.v(i), cache.shape().capacity_tokens, first_key};
    POLYKV_RETURN_IF_ERROR(pass_->project(i, layer));
    POLYKV_RETURN_IF_ERROR(show_queries(i, first_key, row_count, options));
    const uint32_t rows = i + 1 == config_.layer_count ? wanted_rows : row_count;
    if (rows > 0) POLYKV_RETURN_IF_ERROR(pass_->finish_layer(i, layer, rows));
  }
  // Progress means work that is done, and an error shows in the call that it is of.
  POLYKV_RETURN_IF_ERROR(pass_->synchronize());
  cache.set_token_count(first_key + row_count);
  return Status::ok();
}

Status DeviceTransformer::forward(std::span<const uint32_t> ids, DeviceKvCache& cache,
                                  std::span<float> logits, const ForwardOptions& options) {
  assert(options.prefix == nullptr && !options.before_rope);
  POLYKV_RETURN_IF_ERROR(check_forward(config_, ids, logits.size(), cache.shape(), options));
  POLYKV_RETURN_IF_ERROR(place_.runtime->use_device(place_.index));
  const size_t vocabulary = config_.vocab_size;
  const bool all_rows = !logits.empty() && logits.size() == ids.size() * vocabulary;
  const auto end = static_cast<uint32_t>(cache.token_count() + ids.size());
  const size_t chunk = std::min<size_t>(options.chunk_tokens, ids.size());
  for (size_t done = 0; done < ids.size(); done += chunk) {
    const auto part = ids.subspan(done, std::min(chunk, ids.size() - done));
    const bool is_last = done + part.size() == ids.size();
    const uint32_t last_row = is_last && !logits.empty() ? 1 : 0;
    const uint32_t wanted_rows = all_rows ? static_cast<uint32_t>(part.size()) : last_row;
    POLYKV_RETURN_IF_ERROR(with_free_memory(place_, run_chunk(part, cache, wanted_rows, options)));
    if (wanted_rows > 0) {
      POLYKV_RETURN_IF_ERROR(with_free_memory(
          place_,
          pass_->read_out(wanted_rows, logits.data() + (all_rows ? done * vocabulary : 0))));
    }
    if (options.progress && !options.progress(cache.token_count(), end) && !is_last)
      return forward_cancelled(cache.token_count());
  }
  return Status::ok();
}

MemoryEstimate estimate_device_memory(const ModelConfig& config, bool tied_output,
                                      uint32_t token_count, uint32_t chunk_tokens,
                                      const DevicePassSettings& settings) {
  const uint64_t rows = std::max(1U, std::min(token_count, chunk_tokens));
  const uint64_t heads = uint64_t{config.head_count} * config.head_dim;
  const uint64_t qkv = heads + uint64_t{2} * config.kv_head_count * config.head_dim;
  // At the widest point of a layer: the residual stream, its square and norm; Q, K and V with what turns them; gate, up
  // and their product.
  const uint64_t row_floats = 4 * uint64_t{config.embedding_length} + 2 * qkv + 2 * heads +
                              4 * uint64_t{config.feed_forward_length};
  // Logits and weights of a tile; where attention is fused only its mask, which is less.
  const uint64_t most_logits = rows * config.head_count * token_count;
  const uint64_t tile = std::max<uint64_t>(std::min(settings.tile_logits, most_logits),
                                           uint64_t{config.head_count} * token_count);
  // cuBLAS's workspace, and what torch's allocator rounds up.
  constexpr uint64_t kRoomBytes = uint64_t{160} << 20;
  MemoryEstimate estimate;
  estimate.weights_bytes = device::round_up(weights_bytes(config, tied_output));
  estimate.kv_cache_bytes = device::round_up(KvCache::size_bytes(config, token_count));
  estimate.scratch_bytes =
      sizeof(float) * (rows * row_floats + config.vocab_size + 2 * tile) + kRoomBytes;
  return estimate;
}

}  // namespace polykv
