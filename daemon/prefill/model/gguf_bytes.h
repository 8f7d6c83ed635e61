// Shared by the two halves of the GGUF reader (gguf_parser.cpp, gguf.cpp).
#pragma once

#include <cstdint>
#include <cstring>

namespace polykv::gguf_internal {

/// A little-endian value at an address of any alignment.
template <typename T>
T load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

inline constexpr const char* kFetchAgain = "the file is damaged, fetch it again";

}  // namespace polykv::gguf_internal
