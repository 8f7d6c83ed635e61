#include "daemon/prefill/worker/prefill_model.h"

#include <utility>

namespace polykv {

Result<PrefillModel> PrefillModel::open(UniqueFd file, std::string name,
                                        const std::optional<Digest>& known_fingerprint) {
  PrefillModel result;
  result.file_ = std::move(file);
  POLYKV_ASSIGN_OR_RETURN(Model model, Model::open(result.file_.get(), std::move(name)));
  result.model_ = std::make_unique<Model>(std::move(model));
  POLYKV_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::from_gguf(result.model_->gguf()));
  result.tokenizer_ = std::make_unique<Tokenizer>(std::move(tokenizer));
  Digest fingerprint{};
  if (known_fingerprint) {
    fingerprint = *known_fingerprint;
  } else {
    POLYKV_ASSIGN_OR_RETURN(fingerprint, model_fingerprint(*result.model_));
  }
  result.identity_ = model_identity(result.model_->config(), fingerprint);
  return result;
}

Result<Weights> PrefillModel::load_weights(uint32_t thread_count,
                                           const Weights::Progress& progress) const {
  POLYKV_ASSIGN_OR_RETURN(Weights weights, Weights::load(*model_, thread_count, progress));
  if (weights.fingerprint() == identity_.fingerprint) return weights;
  return {POLYKV_ERR_MODEL_FORMAT,
          "load model " + quoted(model_->file().name()) +
              ": the file was changed after it was identified; put the document once more"};
}

}  // namespace polykv
