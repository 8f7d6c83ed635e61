// A document whose K and V are a formula, published through libpolykv, for tests of the client.
// Uses Catch2's REQUIRE.
#pragma once

#include <catch2/catch.hpp>
#include <cmath>
#include <string>
#include <vector>

#include "polykv/polykv.hpp"
#include "tests/support/require_ok.h"

namespace polykv::test {

/// Looks random to a codec; in -1 .. 1. The same for the same place, whatever the segments.
inline float synthetic_value(bool is_v, uint32_t layer, uint64_t token, uint32_t head,
                             uint32_t dim) {
  uint64_t x = token * 0x9e3779b97f4a7c15U + layer * 977U + head * 131U + dim * 7919U + is_v;
  x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return static_cast<float>(x >> 40) / 8388608.0F - 1.0F;
}

struct SyntheticDocument {
  std::vector<polykv_layer_geometry> layers{{2, 64, 32, 0}, {1, 32, 64, 128}};
  std::vector<uint32_t> tokens;
  polykv_profile profile = POLYKV_PROFILE_EXACT;

  explicit SyntheticDocument(uint64_t token_count, uint32_t seed = 1) {
    for (uint64_t i = 0; i < token_count; ++i) {
      tokens.push_back(static_cast<uint32_t>(i * 31 + seed));
    }
  }

  client::Model model() const {
    client::Model model;
    model.name = "synthetic";
    model.fingerprint[31] = 7;
    model.layer_count = static_cast<uint32_t>(layers.size());
    model.layers = layers.data();
    return model;
  }

  /// Asks for it, offering to produce it. `model` must outlive the options.
  client::AcquireOptions options(const client::Model& model, const char* name = nullptr) const {
    client::AcquireOptions options;
    options.model = &model;
    options.tokens = tokens.data();
    options.token_count = tokens.size();
    options.profile = profile;
    options.publish_name = name;
    return options;
  }

  /// One layer's K or V, dense [token, kv_head, dim].
  std::vector<float> values(bool is_v, uint32_t layer, uint64_t first, uint64_t count) const {
    const uint32_t dims = is_v ? layers[layer].v_head_dim : layers[layer].k_head_dim;
    std::vector<float> result;
    for (uint64_t token = first; token < first + count; ++token) {
      for (uint32_t head = 0; head < layers[layer].kv_head_count; ++head) {
        for (uint32_t dim = 0; dim < dims; ++dim) {
          result.push_back(synthetic_value(is_v, layer, token, head, dim));
        }
      }
    }
    return result;
  }

  /// Calls action(layer, K and V of its tokens [first, first + count)); the first failure ends it.
  template <typename Action>
  client::Result<> for_each_layer(uint64_t first, uint64_t count, Action action) const {
    for (uint32_t layer = 0; layer < layers.size(); ++layer) {
      const std::vector<float> k = values(false, layer, first, count);
      const std::vector<float> v = values(true, layer, first, count);
      client::KvSource source;
      source.k = k.data();
      source.v = v.data();
      if (auto done = action(layer, source); !done) return done;
    }
    return std::monostate();
  }

  client::Result<> encode_all(client::Segment& segment, uint64_t first, uint64_t count) const {
    return for_each_layer(first, count, [&](uint32_t layer, const client::KvSource& source) {
      return segment.encode_layer(layer, source);
    });
  }

  /// Has the layers of the next segment judged by two queries of two heads a kv_head.
  client::Result<> examine_all(client::Publisher& publisher, uint64_t count) const {
    const auto examine = [&](uint32_t layer, const client::KvSource& source) {
      client::LayerQueries queries;
      queries.query_count = 2;
      queries.head_count = 2 * layers[layer].kv_head_count;
      const std::vector<float> q(size_t{2} * queries.head_count * layers[layer].k_head_dim, 0.1F);
      queries.q = q.data();
      return publisher.examine_layer(count, layer, source, queries);
    };
    return for_each_layer(publisher.next_token(), count, examine);
  }

  /// The next segment of a publisher; 0: as long as the library chooses.
  void publish_segment(client::Publisher& publisher, uint64_t token_count = 0) const {
    const uint64_t first = publisher.next_token();
    auto segment = publisher.begin_segment(token_count);
    REQUIRE_OK(segment);
    if (token_count == 0) token_count = std::min<uint64_t>(4096, tokens.size() - first);
    REQUIRE_OK(encode_all(*segment, first, token_count));
    REQUIRE_OK(segment->commit());
  }

  client::Publisher become_producer(client::Session& session, const char* name = nullptr) const {
    const client::Model its_model = model();
    auto acquired = session.acquire_or_produce(options(its_model, name));
    INFO((acquired.ok() ? "" : acquired.error().message));
    REQUIRE_OK(acquired);
    REQUIRE(std::holds_alternative<client::Publisher>(*acquired));
    return std::get<client::Publisher>(std::move(*acquired));
  }

  client::Lease publish(client::Session& session, const char* name,
                        uint64_t segment_tokens = 0) const {
    client::Publisher publisher = become_producer(session, name);
    while (publisher.next_token() < tokens.size()) {
      const uint64_t left = tokens.size() - publisher.next_token();
      publish_segment(publisher, segment_tokens == 0 ? 0 : std::min(segment_tokens, left));
    }
    auto lease = publisher.finish_with_lease();
    REQUIRE_OK(lease);
    return std::move(*lease);
  }

  /// Largest difference between what a lease decodes to and what was published.
  float worst_error(const client::Lease& lease) const {
    float worst = 0;
    for (uint32_t layer = 0; layer < layers.size(); ++layer) {
      const std::vector<float> want_k = values(false, layer, 0, tokens.size());
      const std::vector<float> want_v = values(true, layer, 0, tokens.size());
      std::vector<float> k(want_k.size());
      std::vector<float> v(want_v.size());
      client::DecodeOptions options;
      options.token_count = tokens.size();
      options.k = k.data();
      options.v = v.data();
      if (!lease.decode(layer, options)) return INFINITY;
      for (size_t i = 0; i < k.size(); ++i) worst = std::max(worst, std::abs(k[i] - want_k[i]));
      for (size_t i = 0; i < v.size(); ++i) worst = std::max(worst, std::abs(v[i] - want_v[i]));
    }
    return worst;
  }
};

inline client::Session connect_to(const std::string& socket_path) {
  client::ConnectOptions options;
  options.socket_path = socket_path.c_str();
  auto session = client::Session::connect(options);
  INFO((session.ok() ? "" : session.error().message));
  REQUIRE_OK(session);
  return std::move(*session);
}

}  // namespace polykv::test
