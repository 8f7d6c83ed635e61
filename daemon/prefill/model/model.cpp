#include "daemon/prefill/model/model.h"

#include <utility>

namespace polykv {

Result<Model> Model::open(int fd, std::string name) {
  POLYKV_ASSIGN_OR_RETURN(FileSource file, FileSource::open(fd, std::move(name)));
  POLYKV_ASSIGN_OR_RETURN(GgufFile gguf, GgufFile::parse(file));
  POLYKV_ASSIGN_OR_RETURN(ModelConfig config, model_config_from_gguf(gguf));
  POLYKV_ASSIGN_OR_RETURN(LlamaTensors tensors, find_llama_tensors(gguf, config));
  return Model(std::move(file), std::move(gguf), std::move(config), std::move(tensors));
}

Result<std::vector<uint32_t>> tokenize_document(const Tokenizer& tokenizer, const GgufFile& gguf,
                                                const DocumentText& document) {
  std::vector<uint32_t> ids;
  const auto append = [&](std::string_view text, const TokenizeOptions& options) -> Status {
    POLYKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> part, tokenizer.encode(text, options));
    ids.insert(ids.end(), part.begin(), part.end());
    return Status::ok();
  };
  const bool parse_special = document.options.parse_special;
  if (document.options.add_bos) POLYKV_RETURN_IF_ERROR(append({}, {true, false}));
  if (document.chat_head) {
    POLYKV_ASSIGN_OR_RETURN(const ChatFrame frame, chat_frame_from_gguf(gguf));
    POLYKV_RETURN_IF_ERROR(append(frame.head, {false, true}));
  }
  POLYKV_RETURN_IF_ERROR(append(document.before, {false, true}));
  const size_t before_text = ids.size();
  POLYKV_RETURN_IF_ERROR(append(document.text, {false, parse_special}));
  if (ids.size() == before_text) {
    return {POLYKV_ERR_EMPTY_DOCUMENT, "tokenise: the text gives no tokens; give a file with text"};
  }
  return ids;
}

Result<std::vector<uint32_t>> tokenize_document(int model_fd, const std::string& model_name,
                                                const DocumentText& document) {
  POLYKV_ASSIGN_OR_RETURN(const FileSource file, FileSource::open(model_fd, model_name));
  POLYKV_ASSIGN_OR_RETURN(const GgufFile gguf, GgufFile::parse(file));
  POLYKV_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::from_gguf(gguf));
  return tokenize_document(tokenizer, gguf, document);
}

Result<ModelSummary> model_summary(int fd, const std::string& name) {
  POLYKV_ASSIGN_OR_RETURN(const Model model, Model::open(fd, name));
  ModelSummary summary;
  summary.config = model.config();
  POLYKV_ASSIGN_OR_RETURN(const auto tokenizer, model.gguf().string("tokenizer.ggml.model"));
  summary.tokenizer = tokenizer;
  if (model.gguf().has("tokenizer.ggml.pre")) {
    POLYKV_ASSIGN_OR_RETURN(const auto pre, model.gguf().string("tokenizer.ggml.pre"));
    summary.tokenizer += "/" + std::string(pre);
  }
  summary.has_chat_template = chat_frame_from_gguf(model.gguf()).is_ok();
  summary.file_bytes = model.file().size_bytes();
  for (const TensorInfo& tensor : model.gguf().tensors()) {
    summary.parameter_count += tensor.value_count;
    ++summary.tensor_types[tensor_type_name(tensor.type)];
  }
  return summary;
}

}  // namespace polykv
