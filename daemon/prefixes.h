// Which tokens have sealed segments already, whatever document they were computed for.
//
// A segment knows the one that it continues, so a segment and a position in it are a whole prefix.
// The index finds segments by the chain digests at multiples of 256 tokens that lie in them, per
// domain and codec profile. Who retires a segment takes it out.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "daemon/segments.h"

namespace polykv::daemon {

/// A token list and its chain digests; a selector's, or a document's.
struct TokenChain {
  std::span<const uint32_t> tokens;
  std::span<const Digest> digests;
};

/// The parts that hold the tokens before `end_token`, of which `segment` holds the last.
std::vector<SegmentPart> parts_up_to(const std::shared_ptr<Segment>& segment, uint64_t end_token);

/// For the loop's thread.
class PrefixIndex {
 public:
  /// A sealed segment that may be continued.
  void add(const std::shared_ptr<Segment>& segment);
  void erase(const Segment& segment);

  /// The longest prefix whose length is a multiple of 256, or all of the tokens wherever they end.
  /// Empty: none. The tokens themselves are compared, not the digests alone. Costs a look-up for
  /// each 256 tokens of the prefix.
  std::vector<SegmentPart> longest(Domain domain, Profile profile, const Digest& root,
                                   const TokenChain& chain) const;

  size_t size() const { return by_digest_.size(); }

 private:
  struct Key {
    Domain domain;
    Profile profile;
    Digest digest;
    auto operator<=>(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  /// The last boundary at or before a segment's begin, and the tokens from there to the segment's
  /// end, at most 256: neighbours go on alike.
  struct StartKey {
    Key key;
    std::span<const uint32_t> tokens;  // in the memory of the segment's own
    bool operator<(const StartKey& other) const;
  };
  static StartKey start_of(const Segment& segment);
  static bool holds(const Segment& segment, std::span<const uint32_t> tokens);

  std::shared_ptr<Segment> find(const Key& key, std::span<const uint32_t> tokens) const;
  std::shared_ptr<Segment> find_behind(const Key& key, std::span<const uint32_t> tokens,
                                       uint64_t boundary) const;

  // By the boundaries that lie in the segment or at its end, and by the one before its begin.
  std::unordered_multimap<Key, std::shared_ptr<Segment>, KeyHash> by_digest_;
  std::multimap<StartKey, std::shared_ptr<Segment>> by_start_;
};

}  // namespace polykv::daemon
