// The bytes of version 1 must not change: positions inside blocks by hand, and checksums of whole segments.
#include <xxhash.h>

#include <catch2/catch.hpp>

#include "kernels/block_layout.h"
#include "tests/support/segments.h"

using namespace polykv;
using namespace polykv::test;

namespace {

/// Small multiples of 1/8: exact in every dtype.
LayerValues pattern(const LayerGeometry& geometry, uint64_t token_count) {
  LayerValues values = empty_values(geometry, token_count);
  for (size_t i = 0; i < values.k.size(); ++i) {
    values.k[i] = static_cast<float>(static_cast<int>(i * 7919 % 241) - 120) / 8;
  }
  for (size_t i = 0; i < values.v.size(); ++i) {
    values.v[i] = static_cast<float>(static_cast<int>(i * 104729 % 199) - 99) / 8;
  }
  return values;
}

}  // namespace

TEST_CASE("K8 holds four dims of a token side by side, tokens next, then dim quads") {
  CHECK(k8_offset(0, 0) == 0);
  CHECK(k8_offset(0, 3) == 3);
  CHECK(k8_offset(1, 0) == 4);
  CHECK(k8_offset(63, 3) == 255);
  CHECK(k8_offset(0, 4) == 256);
  CHECK(k8_offset(5, 63) == 15 * 256 + 5 * 4 + 3);
}

TEST_CASE("V8 holds tokens l, l+32, l+16, l+48 of a dim side by side, dims next, then l") {
  CHECK(v8_offset(0, 0, 64) == 0);
  CHECK(v8_offset(32, 0, 64) == 1);
  CHECK(v8_offset(16, 0, 64) == 2);
  CHECK(v8_offset(48, 0, 64) == 3);
  CHECK(v8_offset(0, 1, 64) == 4);
  CHECK(v8_offset(1, 0, 64) == 256);
  CHECK(v8_offset(33, 5, 80) == 80 * 4 + 5 * 4 + 1);
  for (uint32_t token = 0; token < kBlockTokens; ++token) {
    CHECK(quad_token(token_quad(token), token_lane(token)) == token);
  }
}

TEST_CASE("V3 keeps quads 0 to 5 of a group in nibbles and 6 and 7 in their spare bits") {
  constexpr uint32_t kDim = 16;
  const auto written = [](uint32_t token, uint32_t dim, uint32_t code) {
    std::vector<uint8_t> planes(24 * kDim);
    v3_put(planes.data(), token, dim, kDim, code);
    return planes;
  };
  const uint64_t group = 3 * kDim * 4;
  CHECK(written(0, 2, 5)[2 * 4] == 0x05);                 // quad 0, lane 0: plane 0, low nibble
  CHECK(written(33, 2, 5)[2 * 4 + 1] == 0x50);            // quad 1, lane 1: plane 0, high nibble
  CHECK(written(5, 2, 7)[2 * kDim * 4 + 2 * 4] == 0x70);  // quad 5: plane 2, high nibble
  CHECK(written(8, 0, 3)[group] == 0x03);                 // quad 8 opens the second group
  const std::vector<uint8_t> six = written(6, 0, 5);      // bits 0 and 2
  CHECK(six[0] == 0x08);
  CHECK(six[kDim * 4] == 0);
  CHECK(six[2 * kDim * 4] == 0x08);
  const std::vector<uint8_t> seven = written(15, 0, 2);  // quad 15: bit 1, in the second group
  CHECK(seven[group] == 0);
  CHECK(seven[group + kDim * 4] == 0x80);
  for (uint32_t token = 0; token < kBlockTokens; ++token) {
    for (uint32_t dim = 0; dim < kDim; ++dim) {
      const uint32_t code = (token * 5 + dim * 3) % 8;
      const std::vector<uint8_t> planes = written(token, dim, code);
      REQUIRE(v3_get(planes.data(), token, dim, kDim) == code);
    }
  }
}

TEST_CASE("segments of a fixed input have the bytes that version 1 gave them") {
  const std::vector<LayerGeometry> geometry = {{2, 16, 8, 0}, {1, 32, 64, 128}};
  struct Frozen {
    Profile profile;
    uint64_t size_bytes;
    uint64_t checksum;
  };
  const Frozen frozen[] = {
      {Profile::exact, 40960, 0x2dd5cadff62d6b7f},
      {Profile::k8v8, 28672, 0x1d147d445df22feb},
      {Profile::paper_k8v3, 20480, 0xf9a204dff4d65100},
  };
  for (const Frozen& want : frozen) {
    SegmentOptions options;
    options.backend =
        Backend::reference;  // the fast paths may differ where a value lies on a boundary
    options.has_certificate = true;
    const SegmentSpec spec =
        test_spec(test_model(geometry, Dtype::bf16), want.profile, 100, options);
    const AlignedBytes bytes =
        build_segment(spec, {pattern(geometry[0], 100), pattern(geometry[1], 100)}, options);
    CHECK(bytes.span().size() == want.size_bytes);
    CHECK(XXH3_64bits(bytes.span().data(), bytes.span().size()) == want.checksum);
  }
}
