#include "daemon/prefixes.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace polykv::daemon {

std::vector<SegmentPart> parts_up_to(const std::shared_ptr<Segment>& segment, uint64_t end_token) {
  std::vector<SegmentPart> parts;
  uint64_t end = end_token;
  for (std::shared_ptr<Segment> at = segment; at != nullptr; at = at->parent) {
    assert(end > at->first_token && end <= at->end_token());
    parts.push_back({at, end - at->first_token});
    end = at->first_token;
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

size_t PrefixIndex::KeyHash::operator()(const Key& key) const {
  size_t hash = 0;  // a digest is as random as any hash
  std::memcpy(&hash, key.digest.data(), sizeof hash);
  return hash ^ (key.domain * 0x9e3779b97f4a7c15U) ^ static_cast<size_t>(key.profile);
}

bool PrefixIndex::StartKey::operator<(const StartKey& other) const {
  if (key != other.key) return key < other.key;
  return std::lexicographical_compare(tokens.begin(), tokens.end(), other.tokens.begin(),
                                      other.tokens.end());
}

PrefixIndex::StartKey PrefixIndex::start_of(const Segment& segment) {
  const uint64_t boundary = segment.first_token / kChunkTokens * kChunkTokens;
  const auto count = std::min<uint64_t>(segment.end_token() - boundary, kChunkTokens);
  return {{segment.domain, segment.profile, segment.start},
          std::span(*segment.tokens).subspan(boundary, count)};
}

void PrefixIndex::add(const std::shared_ptr<Segment>& segment) {
  for (const Digest& digest : segment->digests)
    by_digest_.emplace(Key{segment->domain, segment->profile, digest}, segment);
  by_start_.emplace(start_of(*segment), segment);
}

void PrefixIndex::erase(const Segment& segment) {
  const auto erase_one = [&](auto& map, const auto& key) {
    const auto [first, last] = map.equal_range(key);
    const auto found = std::find_if(
        first, last, [&](const auto& entry) { return entry.second.get() == &segment; });
    if (found != last) map.erase(found);
  };
  for (const Digest& digest : segment.digests)
    erase_one(by_digest_, Key{segment.domain, segment.profile, digest});
  erase_one(by_start_, start_of(segment));
}

/// Whether the last of these tokens is the segment's, and those before it are its prefix.
bool PrefixIndex::holds(const Segment& segment, std::span<const uint32_t> tokens) {
  return segment.end_token() >= tokens.size() && segment.first_token < tokens.size() &&
         std::equal(tokens.begin(), tokens.end(), segment.tokens->begin());
}

std::shared_ptr<Segment> PrefixIndex::find(const Key& key, std::span<const uint32_t> tokens) const {
  const auto [first, last] = by_digest_.equal_range(key);
  const auto found =
      std::find_if(first, last, [&](const auto& entry) { return holds(*entry.second, tokens); });
  return found == last ? nullptr : found->second;
}

/// Of the segments that begin at or behind a boundary, one that holds the tokens up to their end.
std::shared_ptr<Segment> PrefixIndex::find_behind(const Key& key, std::span<const uint32_t> tokens,
                                                  uint64_t boundary) const {
  const auto tail = tokens.subspan(boundary);
  // Those that go on with these tokens follow the tokens themselves.
  for (auto at = by_start_.lower_bound({key, tail}); at != by_start_.end(); ++at) {
    const StartKey& start = at->first;
    if (start.key != key || start.tokens.size() < tail.size() ||
        !std::equal(tail.begin(), tail.end(), start.tokens.begin())) {
      break;
    }
    if (holds(*at->second, tokens)) return at->second;
  }
  return nullptr;
}

std::vector<SegmentPart> PrefixIndex::longest(Domain domain, Profile profile, const Digest& root,
                                              const TokenChain& chain) const {
  const size_t chunk_count = chain.tokens.size() / kChunkTokens;
  // Whoever has a chunk has those before it, so the first that is missing ends the search.
  size_t known = 0;
  while (known < chunk_count && by_digest_.contains({domain, profile, chain.digests[known]}))
    ++known;
  // All of the tokens: the segment of the last one holds the last boundary, or begins behind it.
  if (chain.tokens.size() - known * kChunkTokens < kChunkTokens) {
    const Key key{domain, profile, known == 0 ? root : chain.digests[known - 1]};
    std::shared_ptr<Segment> all = find(key, chain.tokens);
    if (all == nullptr) all = find_behind(key, chain.tokens, known * kChunkTokens);
    if (all != nullptr) return parts_up_to(all, chain.tokens.size());
  }
  for (; known > 0; --known) {
    const auto tokens = chain.tokens.first(known * kChunkTokens);
    if (const auto segment = find({domain, profile, chain.digests[known - 1]}, tokens))
      return parts_up_to(segment, tokens.size());
  }
  return {};
}

}  // namespace polykv::daemon
