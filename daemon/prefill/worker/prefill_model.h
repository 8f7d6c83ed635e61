// The model that this worker serves: identified at once, its weights read when the first document has
// to be computed. One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "common/fd.h"
#include "common/result.h"
#include "daemon/prefill/model/model.h"
#include "daemon/prefill/model/tokenizer.h"
#include "daemon/prefill/model/weights.h"
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

  bool has_tied_output() const { return model_->tensors().output == nullptr; }
  /// `progress` false cancels. ERR_MODEL_FORMAT when the file is not the one that was fingerprinted
  /// any more.
  Result<Weights> load_weights(uint32_t thread_count, const Weights::Progress& progress) const;

 private:
  PrefillModel() = default;

  UniqueFd file_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  ModelIdentity identity_;
};

}  // namespace polykv
