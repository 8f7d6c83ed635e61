// A model file, opened and checked, and the small questions that tools ask about it. No torch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/model/chat_template.h"
#include "daemon/prefill/model/file_source.h"
#include "daemon/prefill/model/gguf.h"
#include "daemon/prefill/model/llama_tensors.h"
#include "daemon/prefill/model/model_config.h"
#include "daemon/prefill/model/tokenizer.h"

namespace polykv {

/// Immutable; thread-safe. Borrows the descriptor that it was opened with.
class Model {
 public:
  /// Reads and checks head, configuration and tensor table (milliseconds; no tensor data). `name`
  /// is for messages.
  static Result<Model> open(int fd, std::string name);

  const FileSource& file() const { return file_; }
  const GgufFile& gguf() const { return gguf_; }
  const ModelConfig& config() const { return config_; }
  const LlamaTensors& tensors() const { return tensors_; }

 private:
  Model(FileSource file, GgufFile gguf, ModelConfig config, LlamaTensors tensors)
      : file_(std::move(file)),
        gguf_(std::move(gguf)),
        config_(std::move(config)),
        tensors_(std::move(tensors)) {}

  FileSource file_;
  GgufFile gguf_;
  ModelConfig config_;
  LlamaTensors
      tensors_;  // points into gguf_'s tensor list, which keeps its address when the Model moves
};

/// BLAKE2b-256 over the configuration and, sorted by name, each tensor's name, type, shape and the
/// digest of its bytes. Reads the whole file once (about 0.15 s per 100 MB). Weights::load computes
/// the same while it loads.
Result<Digest> model_fingerprint(const Model& model);

/// What a document's ids are made of, in this order: BOS, chat head, `before`, `text`. The parts
/// are tokenised one by one, so that documents with the same beginning share exactly those tokens.
struct DocumentText {
  std::string_view text;
  std::string_view before;  // the caller's own, so its special tokens are parsed; may be empty
  bool chat_head = false;   // the model's chat template up to where the user's text begins
  TokenizeOptions options;  // parse_special is about `text`
};

/// POLYKV_ERR_EMPTY_DOCUMENT when `text` gives no tokens.
Result<std::vector<uint32_t>> tokenize_document(const Tokenizer& tokenizer, const GgufFile& gguf,
                                                const DocumentText& document);

/// The same from a descriptor, for tools that tokenise once.
Result<std::vector<uint32_t>> tokenize_document(int model_fd, const std::string& model_name,
                                                const DocumentText& document);

/// For `polykvctl show` and `doctor`.
struct ModelSummary {
  ModelConfig config;
  std::string tokenizer;           // "gpt2/smollm"
  bool has_chat_template = false;  // one that chat_frame_from_gguf() knows
  uint64_t file_bytes = 0;
  uint64_t parameter_count = 0;
  std::map<std::string, uint32_t> tensor_types;  // type name -> tensors
};
Result<ModelSummary> model_summary(int fd, const std::string& name);

}  // namespace polykv
