#include "common/digest.h"

#include <catch2/catch.hpp>
#include <numeric>

using namespace polykv;

namespace {
ModelIdentity sample() {
  ModelIdentity identity;
  identity.rope = {RopeKind::half_rotation, RopeScaling::none, 64, 10000.0, 1.0, 0};
  identity.layers.assign(3, {3, 64, 64, 0});
  return identity;
}
std::vector<uint32_t> ids(size_t count) {
  std::vector<uint32_t> values(count);
  std::iota(values.begin(), values.end(), 7U);
  return values;
}
}  // namespace

TEST_CASE(
    "the root covers fingerprint, geometry, RoPE parameters and source dtype, but not the name") {
  const Digest root = chain_root(sample());
  const auto differs = [&](auto change) {
    ModelIdentity identity = sample();
    change(identity);
    return chain_root(identity) != root;
  };
  CHECK(!differs([](ModelIdentity& m) { m.name = "another"; }));
  CHECK(differs([](ModelIdentity& m) { m.fingerprint[31] = 1; }));
  CHECK(differs([](ModelIdentity& m) { m.source_dtype = Dtype::f16; }));
  CHECK(differs([](ModelIdentity& m) { m.rope.theta = 10001; }));
  CHECK(differs([](ModelIdentity& m) { m.rope.kind = RopeKind::interleaved; }));
  CHECK(differs([](ModelIdentity& m) { m.rope.scaling = RopeScaling::linear; }));
  CHECK(differs([](ModelIdentity& m) { m.rope.scaling_factor = 2; }));
  CHECK(differs([](ModelIdentity& m) { m.rope.rotary_dim = 32; }));
  CHECK(differs([](ModelIdentity& m) { m.rope.original_context = 32; }));
  CHECK(differs([](ModelIdentity& m) { m.layers.pop_back(); }));
  CHECK(differs([](ModelIdentity& m) { m.layers[1].kv_head_count = 4; }));
  CHECK(differs([](ModelIdentity& m) { m.layers[1].k_head_dim = 128; }));
  CHECK(differs([](ModelIdentity& m) { m.layers[2].v_head_dim = 128; }));
  CHECK(differs([](ModelIdentity& m) { m.layers[0].sliding_window = 512; }));
}

TEST_CASE("equal prefixes have equal chains, and a tail never equals a full chunk") {
  const Digest root = chain_root(sample());
  const auto all = chain_digests(root, ids(700));
  REQUIRE(all.size() == 3);
  const auto two = chain_digests(root, ids(512));
  REQUIRE(two.size() == 2);
  CHECK(two[0] == all[0]);
  CHECK(two[1] == all[1]);
  CHECK(chain_digests(root, ids(701))[2] != all[2]);
  CHECK(chain_digests(root, ids(768))[2] != all[2]);
  CHECK(chain_digests(root, {}).empty());
  auto changed = ids(700);
  changed[3] ^= 1;
  CHECK(chain_digests(root, changed)[1] != all[1]);
}
