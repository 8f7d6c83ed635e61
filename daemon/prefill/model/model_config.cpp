#include "daemon/prefill/model/model_config.h"

#include <cinttypes>

#include "common/wire.h"

namespace polykv {

namespace {

/// Reads one architecture's fields, "llama.block_count" and so on, keeping the first error.
class ConfigReader {
 public:
  ConfigReader(const GgufFile& gguf, std::string prefix)
      : gguf_(gguf), prefix_(std::move(prefix)) {}

  bool has(const char* field) const { return gguf_.has(key(field)); }
  std::string key(const char* field) const { return prefix_ + "." + field; }

  uint32_t integer(const char* field, uint64_t least, uint64_t most) {
    return static_cast<uint32_t>(keep(gguf_.integer(key(field), least, most), least));
  }
  uint32_t integer_or(const char* field, uint64_t least, uint64_t most, uint32_t fallback) {
    return has(field) ? integer(field, least, most) : fallback;
  }
  double number(const char* field, double least, double most) {
    return keep(gguf_.number(key(field), least, most), least);
  }
  double number_or(const char* field, double least, double most, double fallback) {
    return has(field) ? number(field, least, most) : fallback;
  }
  const Status& status() const { return status_; }

 private:
  template <typename T>
  T keep(Result<T> result, T fallback) {
    if (result.is_ok()) return *result;
    if (status_.is_ok()) status_ = result.status();
    return fallback;
  }

  const GgufFile& gguf_;
  std::string prefix_;
  Status status_;
};

Status unsupported(const GgufFile& gguf, const std::string& what, const std::string& remedy) {
  return {POLYKV_ERR_MODEL_UNSUPPORTED,
          "read model " + quoted(gguf.name()) + ": " + what + "; " + remedy};
}

Status contradiction(const GgufFile& gguf, const std::string& what) {
  return {POLYKV_ERR_MODEL_FORMAT, "read model " + quoted(gguf.name()) + ": " + what +
                                       "; the file is damaged, fetch it again"};
}

Result<RopeParameters> rope_parameters(const GgufFile& gguf, const ModelConfig& config,
                                       ConfigReader& reader) {
  RopeParameters rope;
  rope.kind = RopeKind::half_rotation;
  rope.rotary_dim = reader.integer_or("rope.dimension_count", 2, kMaxHeadDim, config.head_dim);
  rope.theta = reader.number_or("rope.freq_base", 1.0, 1e12, 10000.0);
  if (rope.rotary_dim != config.head_dim) {
    return unsupported(gguf,
                       format("llama.rope.dimension_count %u is not the head_dim %u",
                              rope.rotary_dim, config.head_dim),
                       "polykv rotates whole heads only");
  }
  std::string_view scaling = "none";
  if (gguf.has(reader.key("rope.scaling.type"))) {
    POLYKV_ASSIGN_OR_RETURN(scaling, gguf.string(reader.key("rope.scaling.type")));
  }
  if (scaling == "linear") {
    rope.scaling = RopeScaling::linear;
    rope.scaling_factor = reader.number("rope.scaling.factor", 1e-3, 1e6);
    rope.original_context =
        reader.integer_or("rope.scaling.original_context_length", 1, kMaxTokens, 0);
  } else if (scaling != "none") {
    return unsupported(gguf, "llama.rope.scaling.type is " + quoted(scaling),
                       "polykv computes 'none' and 'linear'");
  }
  return rope;
}

}  // namespace

Result<ModelConfig> model_config_from_gguf(const GgufFile& gguf) {
  ModelConfig config;
  POLYKV_ASSIGN_OR_RETURN(config.architecture, gguf.string("general.architecture"));
  if (config.architecture != "llama") {
    return unsupported(gguf, "architecture " + quoted(config.architecture) + " is unknown",
                       "polykv computes 'llama'");
  }
  if (gguf.has("general.name")) {
    POLYKV_ASSIGN_OR_RETURN(config.name, gguf.string("general.name"));
  }

  ConfigReader reader(gguf, config.architecture);
  config.layer_count = reader.integer("block_count", 1, kMaxLayers);
  config.context_length = reader.integer("context_length", 1, kMaxTokens);
  config.embedding_length = reader.integer("embedding_length", 1, ModelLimits::kEmbeddingLength);
  config.feed_forward_length =
      reader.integer("feed_forward_length", 1, ModelLimits::kFeedForwardLength);
  config.head_count = reader.integer("attention.head_count", 1, ModelLimits::kHeadCount);
  config.kv_head_count =
      reader.integer_or("attention.head_count_kv", 1, kMaxKvHeads, config.head_count);
  config.rms_epsilon = reader.number("attention.layer_norm_rms_epsilon", 1e-12, 1e-1);
  POLYKV_RETURN_IF_ERROR(reader.status());

  if (config.head_count % config.kv_head_count != 0 || config.kv_head_count > kMaxKvHeads) {
    return contradiction(
        gguf, format("%u heads cannot share %u kv_heads", config.head_count, config.kv_head_count));
  }
  config.head_dim = reader.integer_or("attention.key_length", 2, kMaxHeadDim,
                                      config.embedding_length / config.head_count);
  const uint32_t value_dim =
      reader.integer_or("attention.value_length", 2, kMaxHeadDim, config.head_dim);
  const uint32_t experts = reader.integer_or("expert_count", 0, UINT32_MAX, 0);
  const uint32_t window = reader.integer_or("attention.sliding_window", 0, UINT32_MAX, 0);
  const double soft_cap = reader.number_or("attn_logit_softcapping", 0, 1e9, 0);
  POLYKV_RETURN_IF_ERROR(reader.status());
  if (config.head_dim < 2 || config.head_dim > kMaxHeadDim || config.head_dim % 2 != 0) {
    return contradiction(gguf, format("head_dim %u is not an even number from 2 to %u",
                                      config.head_dim, kMaxHeadDim));
  }
  if (!reader.has("attention.key_length") && config.embedding_length % config.head_count != 0) {
    return contradiction(gguf, format("embedding length %u is no multiple of %u heads",
                                      config.embedding_length, config.head_count));
  }
  if (value_dim != config.head_dim) {
    return unsupported(gguf, format("V has head_dim %u and K %u", value_dim, config.head_dim),
                       "polykv computes Llama models where they are equal");
  }
  if (experts != 0) {
    return unsupported(gguf, format("llama.expert_count is %u", experts),
                       "polykv computes dense models only");
  }
  if (window != 0 || soft_cap != 0) {
    return unsupported(gguf,
                       format("llama.attention.sliding_window is %u and "
                              "llama.attn_logit_softcapping %g",
                              window, soft_cap),
                       "polykv computes models that attend to all tokens, without a soft-cap");
  }
  POLYKV_ASSIGN_OR_RETURN(config.rope, rope_parameters(gguf, config, reader));
  POLYKV_RETURN_IF_ERROR(reader.status());

  POLYKV_ASSIGN_OR_RETURN(const uint64_t token_count, gguf.array_count("tokenizer.ggml.tokens"));
  if (token_count == 0 || token_count > ModelLimits::kVocabSize) {
    return contradiction(gguf, format("the vocabulary has %" PRIu64 " tokens", token_count));
  }
  config.vocab_size = reader.integer_or("vocab_size", 1, ModelLimits::kVocabSize,
                                        static_cast<uint32_t>(token_count));
  POLYKV_RETURN_IF_ERROR(reader.status());
  if (config.vocab_size != token_count) {
    return contradiction(gguf,
                         format("llama.vocab_size is %u and the vocabulary has %" PRIu64 " tokens",
                                config.vocab_size, token_count));
  }
  return config;
}

ModelIdentity model_identity(const ModelConfig& config, const Digest& fingerprint) {
  ModelIdentity identity;
  // A file may say anything; what is no name is not worth refusing a model for.
  if (check_name(config.name).is_ok()) identity.name = config.name;
  identity.fingerprint = fingerprint;
  identity.source_dtype = Dtype::f32;
  identity.rope = config.rope;
  identity.layers.assign(config.layer_count,
                         {config.kv_head_count, config.head_dim, config.head_dim, 0});
  return identity;
}

}  // namespace polykv
