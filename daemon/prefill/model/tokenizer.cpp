#include "daemon/prefill/model/tokenizer.h"

#include <algorithm>
#include <unordered_map>

#include "daemon/prefill/model/byte_pair.h"
#include "daemon/prefill/model/model_config.h"
#include "daemon/prefill/model/pre_tokenizer.h"
#include "daemon/prefill/model/utf8.h"

namespace polykv {

namespace {

/// Numbers of the file format.
enum TokenKind : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

constexpr size_t kMaxSpecialTokens = 8192;
constexpr size_t kMaxTextBytes = size_t{1} << 30;  // positions within a text are 32-bit

struct SpecialToken {
  uint32_t id;
  bool is_text;  // user-defined: matched whether or not special tokens are parsed
};

/// A piece of the input: one special token, or text between such.
struct Fragment {
  std::optional<uint32_t> id;
  std::string_view text;
};

}  // namespace

struct Tokenizer::State {
  PreTokenizer pre_tokenizer;
  BytePairMerges merges;
  std::vector<std::string> token_bytes;
  std::vector<int32_t> kinds;
  std::vector<SpecialToken> specials;  // longest name first
  std::optional<uint32_t> bos;
  std::optional<uint32_t> eos;
  std::vector<uint32_t> end_of_generation;

  explicit State(PreTokenizer pre) : pre_tokenizer(std::move(pre)) {}

  bool is_special(uint32_t id) const { return kinds[id] == kControl || kinds[id] == kUnknown; }
  std::vector<Fragment> partition(std::string_view text, bool parse_special) const;
};

namespace {

/// What is needed only while a vocabulary is read.
class VocabularyReader {
 public:
  explicit VocabularyReader(const GgufFile& gguf) : gguf_(gguf) {}

  Status malformed(const std::string& what) const {
    return {POLYKV_ERR_MODEL_FORMAT, "read tokenizer of model " + quoted(gguf_.name()) + ": " +
                                         what + "; the file is damaged, fetch it again"};
  }

  /// Fills token_bytes and kinds, and remembers the normal tokens by their text.
  Status read_tokens(std::vector<std::string>* token_bytes, std::vector<int32_t>* kinds) {
    POLYKV_ASSIGN_OR_RETURN(const auto texts, gguf_.strings("tokenizer.ggml.tokens"));
    POLYKV_ASSIGN_OR_RETURN(*kinds, gguf_.integers("tokenizer.ggml.token_type"));
    if (texts.empty() || texts.size() > ModelLimits::kVocabSize || kinds->size() != texts.size()) {
      return malformed(
          format("there are %zu tokens and %zu token types", texts.size(), kinds->size()));
    }
    token_bytes->reserve(texts.size());
    ids_.reserve(texts.size());
    for (uint32_t id = 0; id < texts.size(); ++id) {
      const int32_t kind = (*kinds)[id];
      if (kind < kNormal || kind > kByte) {
        return malformed(format("token %u has type %d", id, kind));
      }
      if (kind != kNormal) {
        token_bytes->emplace_back(texts[id]);
        continue;
      }
      auto bytes = byte_level_decode(texts[id]);
      if (!bytes) {
        return malformed(format("token %u, %s, is not in the byte-level alphabet", id,
                                quoted(texts[id]).c_str()));
      }
      token_bytes->push_back(std::move(*bytes));
      ids_.insert_or_assign(texts[id], id);
    }
    return Status::ok();
  }

  Status read_merges(const std::vector<std::string>& token_bytes, BytePairMerges* merges) {
    for (const auto& [text, id] : ids_) {
      const std::string& bytes = token_bytes[id];
      if (bytes.size() == 1) merges->set_byte(static_cast<uint8_t>(bytes[0]), id);
    }
    POLYKV_ASSIGN_OR_RETURN(const auto lines, gguf_.strings("tokenizer.ggml.merges"));
    std::string joined;
    for (uint32_t rank = 0; rank < lines.size(); ++rank) {
      const std::string_view line = lines[rank];
      const size_t space = line.find(' ', 1);
      if (space == std::string_view::npos) {
        return malformed(format("merge %u, %s, has no two parts", rank, quoted(line).c_str()));
      }
      const std::string_view left = line.substr(0, space);
      const std::string_view right = line.substr(space + 1);
      joined.assign(left).append(right);
      const auto left_id = ids_.find(left);
      const auto right_id = ids_.find(right);
      const auto merged_id = ids_.find(joined);
      if (left_id == ids_.end() || right_id == ids_.end() || merged_id == ids_.end()) {
        return malformed(
            format("merge %u, %s, names no normal tokens", rank, quoted(line).c_str()));
      }
      merges->add(left_id->second, right_id->second, rank, merged_id->second);
    }
    return Status::ok();
  }

  Status read_optional_id(const char* key, size_t vocab_size, std::optional<uint32_t>* id) const {
    if (!gguf_.has(key)) return Status::ok();
    POLYKV_ASSIGN_OR_RETURN(*id, gguf_.integer(key, 0, vocab_size - 1));
    return Status::ok();
  }

 private:
  const GgufFile& gguf_;
  std::unordered_map<std::string_view, uint32_t> ids_;
};

}  // namespace

Result<Tokenizer> Tokenizer::from_gguf(const GgufFile& gguf) {
  POLYKV_ASSIGN_OR_RETURN(const std::string_view model, gguf.string("tokenizer.ggml.model"));
  if (model != "gpt2") {
    return {POLYKV_ERR_MODEL_UNSUPPORTED, "read tokenizer of model " + quoted(gguf.name()) +
                                              ": tokenizer.ggml.model " + quoted(model) +
                                              " is unknown; polykv reads 'gpt2' (byte-level BPE)"};
  }
  POLYKV_ASSIGN_OR_RETURN(const std::string_view pre, gguf.string("tokenizer.ggml.pre"));
  auto pre_tokenizer = PreTokenizer::create(pre);
  if (!pre_tokenizer.is_ok()) {
    return pre_tokenizer.status().with_context("read tokenizer of model " + quoted(gguf.name()));
  }
  auto state = std::make_unique<State>(std::move(pre_tokenizer).value());
  VocabularyReader reader(gguf);
  POLYKV_RETURN_IF_ERROR(reader.read_tokens(&state->token_bytes, &state->kinds));
  POLYKV_RETURN_IF_ERROR(reader.read_merges(state->token_bytes, &state->merges));

  const size_t vocab_size = state->token_bytes.size();
  std::optional<uint32_t> eot;
  POLYKV_RETURN_IF_ERROR(
      reader.read_optional_id("tokenizer.ggml.bos_token_id", vocab_size, &state->bos));
  POLYKV_RETURN_IF_ERROR(
      reader.read_optional_id("tokenizer.ggml.eos_token_id", vocab_size, &state->eos));
  POLYKV_RETURN_IF_ERROR(reader.read_optional_id("tokenizer.ggml.eot_token_id", vocab_size, &eot));

  for (uint32_t id = 0; id < vocab_size; ++id) {
    const bool is_text = state->kinds[id] == kUserDefined;
    if ((!is_text && !state->is_special(id)) || state->token_bytes[id].empty()) continue;
    state->specials.push_back({id, is_text});
    const std::string& name = state->token_bytes[id];
    const bool ends = name == "<|im_end|>" || name == "<|endoftext|>" || name == "<|eot_id|>";
    if (ends || id == state->eos || id == eot) state->end_of_generation.push_back(id);
  }
  if (state->specials.size() > kMaxSpecialTokens) {
    return {POLYKV_ERR_MODEL_UNSUPPORTED,
            format("read tokenizer of model %s: %zu special tokens; polykv handles %zu",
                   quoted(gguf.name()).c_str(), state->specials.size(), kMaxSpecialTokens)};
  }
  std::stable_sort(state->specials.begin(), state->specials.end(),
                   [&](const SpecialToken& a, const SpecialToken& b) {
                     return state->token_bytes[a.id].size() > state->token_bytes[b.id].size();
                   });
  return Tokenizer(std::move(state));
}

Tokenizer::Tokenizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

/// Longest names first over the whole text, as llama.cpp does it.
std::vector<Fragment> Tokenizer::State::partition(std::string_view text, bool parse_special) const {
  std::vector<Fragment> fragments;
  if (!text.empty()) fragments.push_back({std::nullopt, text});
  for (const SpecialToken& special : specials) {
    if (!special.is_text && !parse_special) continue;
    const std::string& name = token_bytes[special.id];
    if (text.find(name) == std::string_view::npos) continue;
    std::vector<Fragment> next;
    for (const Fragment& fragment : fragments) {
      std::string_view rest = fragment.text;
      size_t found = 0;
      while (!fragment.id && (found = rest.find(name)) != std::string_view::npos) {
        if (found > 0) next.push_back({std::nullopt, rest.substr(0, found)});
        next.push_back({special.id, {}});
        rest = rest.substr(found + name.size());
      }
      if (fragment.id || !rest.empty()) next.push_back({fragment.id, rest});
    }
    fragments = std::move(next);
  }
  return fragments;
}

Result<std::vector<uint32_t>> Tokenizer::encode(std::string_view text,
                                                const TokenizeOptions& options) const {
  if (text.size() > kMaxTextBytes) {
    return {POLYKV_ERR_LIMIT,
            format("tokenise: the text has %zu bytes, at most %zu are taken; split it", text.size(),
                   kMaxTextBytes)};
  }
  std::vector<uint32_t> ids;
  if (options.add_bos) {
    if (!state_->bos) {
      return {POLYKV_ERR_MODEL_UNSUPPORTED,
              "tokenise: the model's vocabulary has no BOS token; leave it out"};
    }
    ids.push_back(*state_->bos);
  }
  const std::string valid = replace_invalid_utf8(text);
  std::vector<std::string_view> words;
  for (const Fragment& fragment : state_->partition(valid, options.parse_special)) {
    if (fragment.id) {
      ids.push_back(*fragment.id);
      continue;
    }
    words.clear();
    POLYKV_RETURN_IF_ERROR(state_->pre_tokenizer.split(fragment.text, &words));
    for (const std::string_view word : words) state_->merges.encode(word, &ids);
  }
  return ids;
}

std::string_view Tokenizer::token_bytes(uint32_t id) const {
  return id < vocab_size() ? std::string_view(state_->token_bytes[id]) : std::string_view();
}

bool Tokenizer::is_special(uint32_t id) const {
  return id < vocab_size() && state_->is_special(id);
}

std::string Tokenizer::decode(std::span<const uint32_t> ids, bool with_special) const {
  std::string text;
  for (const uint32_t id : ids) {
    if (with_special || !is_special(id)) text += token_bytes(id);
  }
  return text;
}

uint32_t Tokenizer::vocab_size() const {
  return static_cast<uint32_t>(state_->token_bytes.size());
}
std::optional<uint32_t> Tokenizer::bos_id() const {
  return state_->bos;
}
std::optional<uint32_t> Tokenizer::eos_id() const {
  return state_->eos;
}

bool Tokenizer::is_end_of_generation(uint32_t id) const {
  const auto& ends = state_->end_of_generation;
  return std::find(ends.begin(), ends.end(), id) != ends.end();
}

std::optional<uint32_t> Tokenizer::special_id(std::string_view name) const {
  for (const SpecialToken& special : state_->specials) {
    if (!special.is_text && state_->token_bytes[special.id] == name) return special.id;
  }
  return std::nullopt;
}

}  // namespace polykv
