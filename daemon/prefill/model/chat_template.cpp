#include "daemon/prefill/model/chat_template.h"

#include <string_view>

namespace polykv {

namespace {

constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>";

/// The template's default system message: what a literal "<|im_start|>system\n...<|im_end|>" in it
/// holds. Empty when the template has none, or one that is put together from variables. Jinja
/// literals write a newline as it is or as "\n".
std::string default_system_message(std::string_view text) {
  for (const std::string_view opening : {"<|im_start|>system\n", "<|im_start|>system\\n"}) {
    const size_t found = text.find(opening);
    if (found == std::string_view::npos) continue;
    const size_t begin = found + opening.size();
    const size_t end = text.find(kEnd, begin);
    if (end == std::string_view::npos) continue;
    const std::string_view message = text.substr(begin, end - begin);
    if (message.find_first_of("'\"{}\\+|<>") == std::string_view::npos) return std::string(message);
  }
  return {};
}

}  // namespace

Result<ChatFrame> chat_frame_from_gguf(const GgufFile& gguf) {
  const auto unsupported = [&](const char* cause) {
    return Status(POLYKV_ERR_MODEL_UNSUPPORTED,
                  "chat template of model " + quoted(gguf.name()) + ": " + cause +
                      "; leave the chat head out and give the text to put in front yourself");
  };
  if (!gguf.has("tokenizer.chat_template")) return unsupported("the model has none");
  POLYKV_ASSIGN_OR_RETURN(const std::string_view text, gguf.string("tokenizer.chat_template"));
  const bool is_chatml = text.find(kStart) != std::string_view::npos &&
                         text.find(kEnd) != std::string_view::npos &&
                         text.find("message['role']") != std::string_view::npos &&
                         text.find("message['content']") != std::string_view::npos &&
                         text.find("<|im_start|>assistant") != std::string_view::npos;
  if (!is_chatml) return unsupported("it is not of the ChatML family, the only one known");
  ChatFrame frame;
  const std::string message = default_system_message(text);
  if (!message.empty()) {
    frame.head = std::string(kStart) + "system\n" + message + std::string(kEnd) + "\n";
  }
  frame.head += std::string(kStart) + "user\n";
  frame.tail = std::string(kEnd) + "\n" + std::string(kStart) + "assistant\n";
  return frame;
}

}  // namespace polykv
