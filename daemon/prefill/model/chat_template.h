// The texts that an instruct model expects around what the user says. Only the ChatML family is
// known; a template is recognised, never executed (it is a program in an untrusted file).
#pragma once

#include <string>

#include "common/result.h"
#include "daemon/prefill/model/gguf.h"

namespace polykv {

/// A conversation is head + (document and question) + tail + (answer). Both are to be tokenised
/// with parse_special, because they come from us and not from the document.
struct ChatFrame {
  std::string head;  // "<|im_start|>system\n{default message}<|im_end|>\n<|im_start|>user\n"
  std::string tail;  // "<|im_end|>\n<|im_start|>assistant\n"
};

/// POLYKV_ERR_MODEL_UNSUPPORTED: the model has no chat template, or not one of the ChatML family.
Result<ChatFrame> chat_frame_from_gguf(const GgufFile& gguf);

}  // namespace polykv
