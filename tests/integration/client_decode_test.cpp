// What an agent decodes: any range of a document of several segments, any strides, any dtype.
#include <catch2/catch.hpp>

#include "kernels/half.h"
#include "tests/support/daemon_process.h"
#include "tests/support/require_ok.h"
#include "tests/support/synthetic_document.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr uint64_t kTokens = 1000;
const std::vector<polykv_profile> kProfiles = {POLYKV_PROFILE_EXACT, POLYKV_PROFILE_K8V8,
                                               POLYKV_PROFILE_K5V4, POLYKV_PROFILE_K8V3,
                                               POLYKV_PROFILE_PAPER_K8V3};

/// K then V of one layer, dense [token, kv_head, dim].
std::vector<float> decode_dense(const client::Lease& lease, const SyntheticDocument& document,
                                uint32_t layer, uint64_t first, uint64_t count) {
  const polykv_layer_geometry& geometry = document.layers[layer];
  const uint64_t k_size = count * geometry.kv_head_count * geometry.k_head_dim;
  const uint64_t v_size = count * geometry.kv_head_count * geometry.v_head_dim;
  std::vector<float> values(k_size + v_size);
  client::DecodeOptions options;
  options.first_token = first;
  options.token_count = count;
  options.k = values.data();
  options.v = values.data() + k_size;
  const auto decoded = lease.decode(layer, options);
  INFO((decoded.ok() ? "" : decoded.error().message));
  REQUIRE_OK(decoded);
  return values;
}

client::Lease publish(client::Session& session, SyntheticDocument& document,
                      polykv_profile profile) {
  document.profile = profile;
  const bool single = profile == POLYKV_PROFILE_PAPER_K8V3;
  return document.publish(session, polykv_profile_name(profile), single ? kTokens : 300);
}

}  // namespace

TEST_CASE("a range decodes to the same values as that part of the whole, across segments") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(kTokens);
  for (const polykv_profile profile : kProfiles) {
    const client::Lease lease = publish(session, document, profile);
    CHECK(lease.info().segment_count == (profile == POLYKV_PROFILE_PAPER_K8V3 ? 1 : 4));
    const std::vector<float> whole = decode_dense(lease, document, 0, 0, kTokens);
    const size_t k_row = 2 * 64;
    const size_t v_row = 2 * 32;
    for (const auto& [first, count] : std::vector<std::pair<uint64_t, uint64_t>>{
             {0, 1}, {299, 2}, {250, 500}, {300, 300}, {999, 1}, {63, 65}, {1, 998}}) {
      INFO(polykv_profile_name(profile) << " " << first << " + " << count);
      const std::vector<float> part = decode_dense(lease, document, 0, first, count);
      CHECK(std::equal(part.begin(), part.begin() + static_cast<ptrdiff_t>(count * k_row),
                       whole.begin() + static_cast<ptrdiff_t>(first * k_row)));
      CHECK(std::equal(part.begin() + static_cast<ptrdiff_t>(count * k_row), part.end(),
                       whole.begin() + static_cast<ptrdiff_t>(kTokens * k_row + first * v_row)));
    }
  }
}

TEST_CASE("Hugging Face, transposed, paged and reversed layouts hold the same values") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(kTokens);
  const client::Lease lease = publish(session, document, POLYKV_PROFILE_K8V8);
  constexpr int64_t kFirst = 250;
  constexpr int64_t kCount = 400;
  const std::vector<float> dense = decode_dense(lease, document, 0, kFirst, kCount);
  struct Layout {
    const char* name;
    polykv_strides k;
    int64_t k_origin;
    polykv_strides v;
    int64_t v_origin;
  };
  const std::vector<Layout> layouts = {
      {"[kv_head, token, dim]", {kCount * 64, 64, 1}, 0, {kCount * 32, 32, 1}, 0},
      {"V as [kv_head, dim, token]", {64, 128, 1}, 0, {32 * kCount, 1, kCount}, 0},
      {"rows with gaps", {80, 200, 1}, 0, {70, 200, 2}, 0},
      {"tokens backwards", {64, -128, 1}, (kCount - 1) * 128, {32, -64, 1}, (kCount - 1) * 64},
  };
  for (const Layout& layout : layouts) {
    INFO(layout.name);
    const float untouched = 77.0F;
    std::vector<float> k(100'000, untouched);
    std::vector<float> v(100'000, untouched);
    client::DecodeOptions options;
    options.first_token = kFirst;
    options.token_count = kCount;
    options.k = k.data() + layout.k_origin;
    options.v = v.data() + layout.v_origin;
    options.k_strides = layout.k;
    options.v_strides = layout.v;
    REQUIRE_OK(lease.decode(0, options));
    const auto compare = [&](std::vector<float>& values, int64_t origin, const polykv_strides& s,
                             const float* want, int64_t dims) {
      bool equal = true;
      for (int64_t token = 0; token < kCount; ++token) {
        for (int64_t head = 0; head < 2; ++head) {
          for (int64_t dim = 0; dim < dims; ++dim) {
            float& value = values[static_cast<size_t>(origin + token * s.token + head * s.kv_head +
                                                      dim * s.dim)];
            equal = equal && value == *want++;
            value = untouched;
          }
        }
      }
      // Nothing else was written.
      return equal && std::all_of(values.begin(), values.end(),
                                  [&](float value) { return value == untouched; });
    };
    CHECK(compare(k, layout.k_origin, layout.k, dense.data(), 64));
    CHECK(compare(v, layout.v_origin, layout.v, dense.data() + kCount * 128, 32));
  }
}

TEST_CASE("fp16 and bf16 are the rounded fp32 values, and K or V alone can be asked for") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(kTokens);
  for (const polykv_profile profile : kProfiles) {
    const client::Lease lease = publish(session, document, profile);
    const std::vector<float> dense = decode_dense(lease, document, 1, 200, 300);
    std::vector<uint16_t> k(300 * 32);
    client::DecodeOptions options;
    options.first_token = 200;
    options.token_count = 300;
    options.k = k.data();
    options.dtype = POLYKV_F16;
    REQUIRE_OK(lease.decode(1, options));
    bool equal = true;
    for (size_t i = 0; i < k.size(); ++i) equal = equal && k[i] == f16_from_f32(dense[i]);
    CHECK(equal);
    std::vector<uint16_t> v(300 * 64);
    options.k = nullptr;
    options.v = v.data();
    options.dtype = POLYKV_BF16;
    REQUIRE_OK(lease.decode(1, options));
    equal = true;
    for (size_t i = 0; i < v.size(); ++i) {
      equal = equal && v[i] == bf16_from_f32(dense[k.size() + i]);
    }
    CHECK(equal);
  }
}

TEST_CASE("k8v8, k5v4 and paper-k8v3 are as close and as small as they say", "[memfd]") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(kTokens);
  document.layers.assign(2, {3, 64, 64, 0});
  const auto ratio = [](const client::Lease& lease) {
    const client::DocumentInfo info = lease.info();
    return static_cast<double>(info.bf16_bytes) / static_cast<double>(info.stored_bytes);
  };
  const client::Lease k8v8 = publish(session, document, POLYKV_PROFILE_K8V8);
  CHECK(document.worst_error(k8v8) < 0.02);
  CHECK(ratio(k8v8) > 1.7);
  const client::Lease k5v4 = publish(session, document, POLYKV_PROFILE_K5V4);
  CHECK(document.worst_error(k5v4) < 0.6);
  CHECK(ratio(k5v4) > 2.8);
  const client::Lease paper = publish(session, document, POLYKV_PROFILE_PAPER_K8V3);
  CHECK(document.worst_error(paper) < 1.5);
  CHECK(ratio(paper) > 2.6);
}
