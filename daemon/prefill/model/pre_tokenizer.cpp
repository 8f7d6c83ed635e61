#include "daemon/prefill/model/pre_tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <memory>

#include "daemon/prefill/model/file_source.h"

namespace polykv {

namespace {

// White space is Unicode's White_Space, spelt out: PCRE2's \s counts U+180E as well, which Unicode
// no longer does.
#define POLYKV_SPACES \
  "\\x{9}-\\x{d} "    \
  "\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"

// GPT-2's words: contractions, letters, numerals, other characters, spaces (all but the last one
// before a word).
constexpr const char* kGpt2Words =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" POLYKV_SPACES
    "\\p{L}\\p{N}]+|[" POLYKV_SPACES "]+(?![^" POLYKV_SPACES "])|[" POLYKV_SPACES "]+";
constexpr const char* kOneNumeral = "\\p{N}";

/// Patterns apply one after the other: each splits the pieces that the ones before it left, into
/// matches and what is between them; a piece's end counts as the text's end. That is how llama.cpp
/// applies them, and what the ids depend on.
struct Family {
  std::string_view name;
  std::vector<const char*> patterns;
};
const std::vector<Family>& families() {
  static const std::vector<Family> kFamilies = {{"smollm", {kOneNumeral, kGpt2Words}}};
  return kFamilies;
}

struct MatchDataDeleter {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
using MatchData = std::unique_ptr<pcre2_match_data, MatchDataDeleter>;

Status match_failed(int code) {
  char text[128] = "";
  pcre2_get_error_message(code, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof text);
  return {POLYKV_ERR_LIMIT,
          format("tokenise: the pre-tokenizer gave up (PCRE2: %s); split the text", text)};
}

}  // namespace

Result<PreTokenizer> PreTokenizer::create(std::string_view name) {
  for (const Family& family : families()) {
    if (family.name != name) continue;
    PreTokenizer result;
    for (const char* pattern : family.patterns) {
      int code = 0;
      size_t offset = 0;
      pcre2_code* compiled =
          pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern), PCRE2_ZERO_TERMINATED,
                        PCRE2_UTF | PCRE2_UCP, &code, &offset, nullptr);
      if (compiled == nullptr) {
        return {POLYKV_ERR_INTERNAL,
                format("compile pre-tokenizer pattern %s: PCRE2 error %d at %zu", pattern, code,
                       offset)};
      }
      result.patterns_.push_back(compiled);
    }
    return result;
  }
  return {POLYKV_ERR_MODEL_UNSUPPORTED,
          "pre-tokenizer " + quoted(name) + " is unknown; polykv knows 'smollm'"};
}

PreTokenizer::~PreTokenizer() {
  for (void* pattern : patterns_) pcre2_code_free(static_cast<pcre2_code*>(pattern));
}

Status PreTokenizer::split(std::string_view text, std::vector<std::string_view>* words) const {
  std::vector<std::string_view> pieces{text};
  const MatchData data(pcre2_match_data_create(1, nullptr));
  if (data == nullptr) return {POLYKV_ERR_NO_MEMORY, "tokenise: no memory for PCRE2"};
  for (const void* pattern : patterns_) {
    std::vector<std::string_view> next;
    next.reserve(pieces.size());
    for (const std::string_view piece : pieces) {
      size_t done = 0;
      while (done < piece.size()) {
        // The text is valid UTF-8; to let PCRE2 check the rest at each call would be quadratic.
        const int code = pcre2_match(static_cast<const pcre2_code*>(pattern),
                                     reinterpret_cast<PCRE2_SPTR>(piece.data()), piece.size(), done,
                                     PCRE2_NO_UTF_CHECK, data.get(), nullptr);
        if (code == PCRE2_ERROR_NOMATCH) break;
        if (code < 0) return match_failed(code);
        const size_t* bounds = pcre2_get_ovector_pointer(data.get());
        if (bounds[0] > done) next.push_back(piece.substr(done, bounds[0] - done));
        next.push_back(piece.substr(bounds[0], bounds[1] - bounds[0]));
        done = bounds[1];  // no pattern matches the empty string
      }
      if (done < piece.size()) next.push_back(piece.substr(done));
    }
    pieces = std::move(next);
  }
  words->insert(words->end(), pieces.begin(), pieces.end());
  return Status::ok();
}

}  // namespace polykv
