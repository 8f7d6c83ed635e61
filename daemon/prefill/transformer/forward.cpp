#include "daemon/prefill/transformer/forward.h"

namespace polykv {

Status check_forward(const ModelConfig& config, std::span<const uint32_t> ids, size_t logit_count,
                     const CacheShape& cache, const ForwardOptions& options) {
  const auto invalid = [](const std::string& cause) {
    return Status(POLYKV_ERR_INVALID_ARGUMENT, "forward: " + cause);
  };
  if (ids.empty()) return invalid("no tokens; give at least one");
  if (options.chunk_tokens == 0) return invalid("chunk_tokens is 0; give at least 1");
  const bool all_rows = logit_count == ids.size() * config.vocab_size;
  if (logit_count != 0 && !all_rows && logit_count != config.vocab_size)
    return invalid("logits are not of the vocabulary's size, once or for each token");
  if (cache.layer_count != config.layer_count || cache.kv_head_count != config.kv_head_count ||
      cache.head_dim != config.head_dim) {
    return invalid("the KV cache has another model's shape");
  }
  for (const uint32_t id : ids) {
    if (id >= config.vocab_size) {
      return invalid(format("token id %u is outside the vocabulary of %u", id, config.vocab_size));
    }
  }
  const uint64_t end = uint64_t{cache.token_count} + ids.size();
  const uint64_t sequence = end + (options.prefix != nullptr ? options.prefix->token_count() : 0);
  if (sequence > config.context_length) {
    return {
        POLYKV_ERR_CONTEXT_EXCEEDED,
        format(
            "forward: %llu tokens are more than the model's context of %u; use a shorter document",
            static_cast<unsigned long long>(sequence), config.context_length)};
  }
  if (end > cache.capacity_tokens) return invalid("the KV cache is too small");
  return Status::ok();
}

Status forward_cancelled(uint32_t tokens_in_cache) {
  return {POLYKV_ERR_CANCELLED,
          format("forward: cancelled; the cache has %u tokens", tokens_in_cache)};
}

}  // namespace polykv
