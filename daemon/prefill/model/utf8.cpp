#include "daemon/prefill/model/utf8.h"

#include <cstdint>

namespace polykv {

size_t utf8_character_bytes(std::string_view text, size_t offset) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[offset + i]); };
  const auto continues = [&](size_t i) {
    return offset + i < text.size() && (byte(i) & 0xc0U) == 0x80;
  };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xc2) return 0;  // a continuation byte, or an overlong form
  if (first < 0xe0) return continues(1) ? 2 : 0;
  if (first < 0xf0) {
    if (!continues(1) || !continues(2)) return 0;
    const bool overlong = first == 0xe0 && byte(1) < 0xa0;
    const bool surrogate = first == 0xed && byte(1) >= 0xa0;
    return overlong || surrogate ? 0 : 3;
  }
  if (first > 0xf4 || !continues(1) || !continues(2) || !continues(3)) return 0;
  const bool overlong = first == 0xf0 && byte(1) < 0x90;
  const bool too_large = first == 0xf4 && byte(1) >= 0x90;
  return overlong || too_large ? 0 : 4;
}

std::string replace_invalid_utf8(std::string_view text) {
  static constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD
  std::string valid;
  valid.reserve(text.size());
  size_t offset = 0;
  while (offset < text.size()) {
    const size_t bytes = utf8_character_bytes(text, offset);
    valid += bytes == 0 ? kReplacement : text.substr(offset, bytes);
    offset += bytes == 0 ? 1 : bytes;
  }
  return valid;
}

}  // namespace polykv
