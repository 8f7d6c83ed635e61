// The index of prefixes against a search through everything that was ever sealed: random documents
// of a small alphabet, so that many share a beginning, cut into segments anywhere.
#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <vector>

#include "daemon/documents.h"

using namespace polykv;
using namespace polykv::daemon;

namespace {

/// What must never be confused.
struct Kind {
  Domain domain;
  Profile profile;
  ModelIdentity model;
};

std::vector<Kind> kinds() {
  ModelIdentity model;
  model.source_dtype = Dtype::f32;
  model.rope = {RopeKind::half_rotation, RopeScaling::none, 64, 10'000, 1, 0};
  model.layers = {{2, 64, 64, 0}, {2, 64, 64, 0}};
  std::vector<Kind> all = {{1000, Profile::k8v8, model},
                           {1001, Profile::k8v8, model},
                           {kPublicDomain, Profile::k8v8, model},
                           {1000, Profile::exact, model}};
  const auto add = [&](auto change) {
    ModelIdentity other = model;
    change(other);
    all.push_back({1000, Profile::k8v8, other});
  };
  add([](ModelIdentity& m) { m.fingerprint[31] = 1; });
  add([](ModelIdentity& m) { m.source_dtype = Dtype::f16; });
  add([](ModelIdentity& m) { m.layers.pop_back(); });
  add([](ModelIdentity& m) { m.layers[1].kv_head_count = 1; });
  add([](ModelIdentity& m) { m.layers[1].k_head_dim = 32; });
  add([](ModelIdentity& m) { m.layers[1].v_head_dim = 32; });
  add([](ModelIdentity& m) { m.layers[1].sliding_window = 128; });
  add([](ModelIdentity& m) { m.rope.kind = RopeKind::interleaved; });
  add([](ModelIdentity& m) { m.rope.theta = 500'000; });
  add([](ModelIdentity& m) { m.rope.rotary_dim = 32; });
  add([](ModelIdentity& m) { m.rope.scaling = RopeScaling::linear; });
  add([](ModelIdentity& m) { m.rope.scaling_factor = 2; });
  add([](ModelIdentity& m) { m.rope.original_context = 4096; });
  return all;
}

class Pool {
 public:
  explicit Pool(uint32_t seed) : random_(seed) {}

  uint64_t any(uint64_t least, uint64_t most) {
    return std::uniform_int_distribution<uint64_t>(least, most)(random_);
  }

  /// Mostly the beginning of one of a few texts, then something else.
  std::vector<uint32_t> any_tokens() {
    std::vector<uint32_t> tokens(any(1, 1600));
    const auto text = static_cast<uint32_t>(any(1, 3));
    const uint64_t common = any(0, 1) == 0 ? tokens.size() : any(0, tokens.size());
    for (uint64_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = i < common ? text + static_cast<uint32_t>(i % 7) * text
                             : static_cast<uint32_t>(any(0, 9));
    }
    return tokens;
  }

  std::vector<SegmentPart> longest(const Kind& kind, const std::vector<uint32_t>& tokens) const {
    const Digest root = chain_root(kind.model);
    const std::vector<Digest> chain = chain_digests(root, tokens);
    return catalog.prefixes().longest(kind.domain, kind.profile, root, {tokens, chain});
  }

  void publish(size_t kind, const std::vector<Kind>& all) {
    auto document = std::make_shared<Document>();
    document->serial = catalog.next_serial();
    document->tokens = std::make_shared<const std::vector<uint32_t>>(any_tokens());
    document->root = chain_root(all[kind].model);
    document->chain = std::make_shared<const std::vector<Digest>>(
        chain_digests(document->root, *document->tokens));
    document->key = {all[kind].domain, document->chain->back(), all[kind].profile};
    Selector selector;
    selector.digest = document->key.digest;
    selector.profile = document->key.profile;
    if (catalog.find(document->key.domain, selector) != nullptr) return;
    Catalog::start_with(*document, longest(all[kind], *document->tokens));
    const uint64_t end = document->tokens->size();
    while (document->end_token() < end) {
      const uint64_t first = document->end_token();
      const uint64_t count = any(1, std::min<uint64_t>(end - first, 700));
      auto segment = segments.reserve(first, count, 1);
      segments.fill(*segment, nullptr);
      segments.seal(*segment, UniqueFd());
      const auto chunks_before = static_cast<std::ptrdiff_t>(first / kChunkTokens);
      std::vector<Digest> digests(document->chain->begin() + chunks_before, document->chain->end());
      catalog.append(*document, segment, std::move(digests), true);
    }
    catalog.add(document);
    published.push_back({kind, document});
    ever.push_back(published.back());
  }

  void remove_any() {
    if (published.empty()) return;
    const size_t at = any(0, published.size() - 1);
    catalog.retire(*published[at].document);
    published.erase(published.begin() + static_cast<std::ptrdiff_t>(at));
  }

  /// By looking at every document that there ever was: of one that is removed, what others use is
  /// still there, each segment with all its tokens.
  uint64_t expected(size_t kind, const std::vector<uint32_t>& tokens) const {
    uint64_t best = 0;
    for (const Entry& entry : ever) {
      if (entry.kind != kind) continue;
      uint64_t sealed = 0;
      for (const SegmentPart& part : entry.document->parts) {
        if (part.segment->state != SegmentState::sealed) break;
        sealed += part.token_count;
      }
      const auto other = std::span(*entry.document->tokens).first(sealed);
      const auto differ = std::mismatch(tokens.begin(), tokens.end(), other.begin(), other.end());
      best = std::max(best, static_cast<uint64_t>(differ.first - tokens.begin()));
    }
    return best == tokens.size() ? best : best / kChunkTokens * kChunkTokens;
  }

  struct Entry {
    size_t kind;
    std::shared_ptr<Document> document;
  };
  Segments segments;
  Catalog catalog{segments};
  std::vector<Entry> published;
  std::vector<Entry> ever;

 private:
  std::mt19937 random_;
};

}  // namespace

TEST_CASE("a prefix is found if and only if somebody of the same kind sealed it") {
  const std::vector<Kind> all = kinds();
  const uint32_t seed = GENERATE(range(0U, 12U));
  INFO("seed " << seed);
  Pool pool(seed);
  size_t found_whole = 0;
  size_t found_part = 0;
  for (int step = 0; step < 400; ++step) {
    // Two kinds more often than the others, so that they meet themselves.
    const size_t kind = pool.any(0, 1) == 0 ? pool.any(0, 1) : pool.any(0, all.size() - 1);
    if (pool.any(0, 9) < 3) pool.publish(kind, all);
    if (pool.any(0, 9) == 0) pool.remove_any();
    const std::vector<uint32_t> tokens = pool.any_tokens();
    const std::vector<SegmentPart> parts = pool.longest(all[kind], tokens);
    uint64_t next = 0;
    for (const SegmentPart& part : parts) {
      REQUIRE(part.segment->first_token == next);
      REQUIRE(part.segment->state == SegmentState::sealed);
      REQUIRE(part.token_count <= part.segment->token_count);
      const auto first = static_cast<std::ptrdiff_t>(next);
      next += part.token_count;
      REQUIRE(std::equal(tokens.begin() + first, tokens.begin() + static_cast<std::ptrdiff_t>(next),
                         part.segment->tokens->begin() + first));
    }
    REQUIRE(next == pool.expected(kind, tokens));
    found_whole += next == tokens.size() ? 1 : 0;
    found_part += next > 0 && next < tokens.size() ? 1 : 0;
  }
  CHECK(found_whole > 5);
  CHECK(found_part > 5);
  while (!pool.published.empty()) pool.remove_any();
  CHECK(pool.segments.segment_count() == 0);
  CHECK(pool.catalog.prefixes().size() == 0);
}

TEST_CASE("every kind has a chain of its own, and a short tail is no longer one") {
  const std::vector<uint32_t> tokens(600, 5);
  std::vector<std::vector<Digest>> chains;
  for (const Kind& kind : kinds()) chains.push_back(chain_digests(chain_root(kind.model), tokens));
  // The first four differ in what the catalog's key has beside the digest.
  for (size_t i = 4; i < chains.size(); ++i) {
    for (size_t k = 0; k < chains[i].size(); ++k) CHECK(chains[i][k] != chains[0][k]);
  }
  const Digest root = chain_root(kinds()[0].model);
  std::vector<Digest> last;
  for (size_t count = 1; count <= tokens.size(); ++count)
    last.push_back(chain_digests(root, std::span(tokens).first(count)).back());
  std::sort(last.begin(), last.end());
  CHECK(std::adjacent_find(last.begin(), last.end()) == last.end());
}
