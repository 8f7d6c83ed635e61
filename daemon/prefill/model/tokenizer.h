// Byte-level BPE from a GGUF's vocabulary, split by the model's own pre-tokenizer, ids equal to
// llama.cpp's.
//
// Text is UTF-8. A byte that is not part of valid UTF-8 becomes U+FFFD, as llama.cpp does it. A
// byte for which the vocabulary has no token is left out, as llama.cpp does it (SmolLM2's has none
// for some control characters). Time and memory are linear in the text up to a logarithm, for any
// text.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/model/gguf.h"

namespace polykv {

struct TokenizeOptions {
  bool add_bos = false;  // put the vocabulary's BOS first; an error if it has none
  bool parse_special =
      false;  // "<|im_end|>" in the text becomes that token; off: it stays ordinary text
};

/// Immutable; thread-safe. Does not refer to the GgufFile after from_gguf().
class Tokenizer {
 public:
  /// Takes tens of milliseconds for 49,152 tokens. POLYKV_ERR_MODEL_UNSUPPORTED: tokenizer model
  /// other than "gpt2" (byte-level BPE), unknown pre-tokenizer. POLYKV_ERR_MODEL_FORMAT: vocabulary
  /// or merges contradict themselves.
  static Result<Tokenizer> from_gguf(const GgufFile& gguf);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// No text: no ids (or BOS alone).
  Result<std::vector<uint32_t>> encode(std::string_view text,
                                       const TokenizeOptions& options = {}) const;

  /// The bytes that a token stands for; a special token's are its name. Empty for an id outside the
  /// vocabulary. One token's bytes need not be whole UTF-8 characters.
  std::string_view token_bytes(uint32_t id) const;
  bool is_special(uint32_t id) const;
  /// All tokens' bytes in a row, special tokens left out unless `with_special`.
  std::string decode(std::span<const uint32_t> ids, bool with_special = false) const;

  uint32_t vocab_size() const;
  std::optional<uint32_t> bos_id() const;
  std::optional<uint32_t> eos_id() const;
  bool is_end_of_generation(
      uint32_t id) const;  // eos, or "<|im_end|>", "<|endoftext|>", "<|eot_id|>"
  std::optional<uint32_t> special_id(std::string_view name) const;  // a control token by its name

 private:
  struct State;
  explicit Tokenizer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace polykv
