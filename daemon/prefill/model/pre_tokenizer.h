// Splits text into the words that byte-pair merges stay within, by the regular expressions of the
// model's family.
#pragma once

#include <string_view>
#include <vector>

#include "common/result.h"

namespace polykv {

/// Immutable; thread-safe; owns compiled PCRE2 patterns.
class PreTokenizer {
 public:
  /// By the name in tokenizer.ggml.pre. POLYKV_ERR_MODEL_UNSUPPORTED for an unknown one.
  static Result<PreTokenizer> create(std::string_view name);

  PreTokenizer(PreTokenizer&& other) noexcept : patterns_(std::move(other.patterns_)) {
    other.patterns_.clear();
  }
  PreTokenizer& operator=(PreTokenizer&&) = delete;
  ~PreTokenizer();

  /// Appends the words, which together are the whole text, in order. `text` must be valid UTF-8.
  /// POLYKV_ERR_LIMIT when PCRE2 gives up on the text.
  Status split(std::string_view text, std::vector<std::string_view>* words) const;

 private:
  PreTokenizer() = default;
  std::vector<void*> patterns_;  // pcre2_code
};

}  // namespace polykv
