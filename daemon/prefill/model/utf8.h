// UTF-8 of unknown origin made valid.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace polykv {

/// Bytes of the character that begins at `offset`: 1 to 4, or 0 when what is there is not valid
/// UTF-8 (a stray or missing continuation byte, an overlong form, a surrogate, a number above
/// U+10FFFF). offset < text.size().
size_t utf8_character_bytes(std::string_view text, size_t offset);

/// The text with each byte that is not part of a valid character replaced by U+FFFD. At most three
/// times as long.
std::string replace_invalid_utf8(std::string_view text);

}  // namespace polykv
