// The model that this worker serves: identified at once, its weights loaded when the first document
// has to be computed. One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "common/fd.h"
#include "common/result.h"
#include "daemon/prefill/model/model.h"
#include "daemon/prefill/model/tokenizer.h"
#include "daemon/prefill/transformer/transformer.h"
#include "include/internal/geometry.h"

namespace polykv {

class PrefillModel {
 public:
  /// Reads metadata and tokenizer, and hashes the file unless `known_fingerprint` says what it is.
  /// `name` is for messages. Errors: MODEL_FORMAT, MODEL_UNSUPPORTED, SYSTEM.
  static Result<PrefillModel> open(UniqueFd file, std::string name,
                                   const std::optional<Digest>& known_fingerprint);

  const ModelIdentity& identity() const { return identity_; }
  const ModelConfig& config() const { return model_->config(); }
  const GgufFile& gguf() const { return model_->gguf(); }
  const Tokenizer& tokenizer() const { return *tokenizer_; }

  /// What prefilling that many tokens takes in all, weights included.
  MemoryEstimate estimate(uint32_t token_count, uint32_t chunk_tokens) const;
  bool has_weights() const { return transformer_ != nullptr; }
  /// Loads the weights unless they are there. `progress` false cancels. ERR_MODEL_FORMAT when the
  /// file is not the one that was fingerprinted any more.
  Status load_weights(uint32_t thread_count, const Weights::Progress& progress);
  /// After load_weights().
  Transformer& transformer() { return *transformer_; }

 private:
  PrefillModel() = default;

  UniqueFd file_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  ModelIdentity identity_;
  std::unique_ptr<Transformer> transformer_;
};

}  // namespace polykv
