#include "daemon/prefill/model/byte_pair.h"

#include <algorithm>
#include <queue>

#include "daemon/prefill/model/utf8.h"

namespace polykv {

namespace {

/// character -> byte, for the characters U+0000 to U+0143.
constexpr size_t kAlphabetEnd = 0x144;
constexpr std::array<int16_t, kAlphabetEnd> make_alphabet() {
  std::array<int16_t, kAlphabetEnd> bytes{};
  for (int16_t& byte : bytes) byte = -1;
  size_t next = 0x100;
  for (int16_t byte = 0; byte < 256; ++byte) {
    const bool itself = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) ||
                        (byte >= 0xae && byte <= 0xff);
    bytes[itself ? static_cast<size_t>(byte) : next++] = byte;
  }
  return bytes;
}
constexpr std::array<int16_t, kAlphabetEnd> kAlphabet = make_alphabet();

uint64_t pair_key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

/// The word as a doubly linked list; a symbol that was merged into its left neighbour has id kNone
/// and no links.
struct Symbol {
  int32_t id;
  int32_t before;
  int32_t after;
};

/// A possible merge, in the order in which they are to be done. It is stale when a side has changed
/// since.
struct Candidate {
  uint32_t rank;
  int32_t left;
  int32_t right;
  int32_t left_id;
  int32_t right_id;
  uint32_t merged;
  bool operator>(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : left > other.left;
  }
};
using Queue = std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>>;

}  // namespace

std::optional<std::string> byte_level_decode(std::string_view text) {
  std::string bytes;
  size_t offset = 0;
  while (offset < text.size()) {
    const size_t size = utf8_character_bytes(text, offset);
    if (size == 0 || size > 2) return std::nullopt;
    uint32_t character = static_cast<uint8_t>(text[offset]);
    if (size == 2) {
      character = (character & 0x1fU) << 6 | (static_cast<uint8_t>(text[offset + 1]) & 0x3fU);
    }
    if (character >= kAlphabetEnd || kAlphabet[character] < 0) return std::nullopt;
    bytes += static_cast<char>(kAlphabet[character]);
    offset += size;
  }
  return bytes;
}

void BytePairMerges::add(uint32_t left, uint32_t right, uint32_t rank, uint32_t merged) {
  merges_.emplace(pair_key(static_cast<int32_t>(left), static_cast<int32_t>(right)),
                  Merge{rank, merged});
}

const BytePairMerges::Merge* BytePairMerges::find(int32_t left, int32_t right) const {
  if (left == kNone || right == kNone) return nullptr;
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void BytePairMerges::encode(std::string_view word, std::vector<uint32_t>* ids) const {
  std::vector<Symbol> symbols(word.size());
  const auto count = static_cast<int32_t>(word.size());
  for (int32_t i = 0; i < count; ++i) {
    const auto byte = static_cast<uint8_t>(word[static_cast<size_t>(i)]);
    symbols[static_cast<size_t>(i)] = {byte_ids_[byte], i - 1, i + 1 < count ? i + 1 : kNone};
  }
  const auto at = [&](int32_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };

  Queue queue;
  const auto consider = [&](int32_t left, int32_t right) {
    if (left == kNone || right == kNone) return;
    const Merge* merge = find(at(left).id, at(right).id);
    if (merge == nullptr) return;
    queue.push({merge->rank, left, right, at(left).id, at(right).id, merge->merged});
  };
  for (int32_t i = 0; i + 1 < count; ++i) consider(i, i + 1);

  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = at(best.left);
    Symbol& right = at(best.right);
    const bool stale =
        left.id != best.left_id || right.id != best.right_id || left.after != best.right;
    if (stale) continue;
    left.id = static_cast<int32_t>(best.merged);
    left.after = right.after;
    if (right.after != kNone) at(right.after).before = best.left;
    right = {kNone, kNone, kNone};
    consider(left.before, best.left);
    consider(best.left, left.after);
  }
  // The first symbol is never merged into another, so the list begins there.
  for (int32_t i = count > 0 ? 0 : kNone; i != kNone; i = at(i).after) {
    if (at(i).id != kNone) ids->push_back(static_cast<uint32_t>(at(i).id));
  }
}

}  // namespace polykv
