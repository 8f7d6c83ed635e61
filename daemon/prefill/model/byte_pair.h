// Byte-pair merges over token ids, and the alphabet in which byte-level vocabularies write their
// tokens.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace polykv {

/// GPT-2's alphabet gives each byte a printable character: 0x21-0x7e, 0xa1-0xac and 0xae-0xff stand
/// for themselves, the other 68 bytes in ascending order are U+0100 onwards (a space is U+0120).
/// Returns the bytes that `text` stands for; nullopt if a character is not of the alphabet.
std::optional<std::string> byte_level_decode(std::string_view text);

/// Immutable after it is filled; thread-safe.
class BytePairMerges {
 public:
  static constexpr int32_t kNone = -1;

  BytePairMerges() { byte_ids_.fill(kNone); }
  void set_byte(uint8_t byte, uint32_t id) { byte_ids_[byte] = static_cast<int32_t>(id); }
  /// A later merge of the same pair is ignored.
  void add(uint32_t left, uint32_t right, uint32_t rank, uint32_t merged);

  /// Appends the ids of one word. The pair of lowest rank merges first, of equal ones the leftmost.
  /// n log n in the word's bytes. Bytes without a token are left out.
  void encode(std::string_view word, std::vector<uint32_t>* ids) const;

 private:
  struct Merge {
    uint32_t rank;
    uint32_t merged;
  };
  const Merge* find(int32_t left, int32_t right) const;

  std::array<int32_t, 256> byte_ids_;
  std::unordered_map<uint64_t, Merge> merges_;  // by left id << 32 | right id
};

}  // namespace polykv
