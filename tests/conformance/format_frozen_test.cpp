// The bytes of version 1 must not change: positions inside blocks by hand, and checksums of whole segments.
#include <xxhash.h>

#include <catch2/catch.hpp>

#include "kernels/block_layout.h"
#include "kernels/codebooks.h"
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

TEST_CASE(
    "K4 to K6 hold pieces of 32 tokens and 16 dims: lines of nibbles, then what is above them") {
  const auto place = [](CodePlace p) { return std::pair(p.offset, p.shift); };
  using Place = std::pair<uint64_t, uint32_t>;
  CHECK(place(k_low_place(0, 0, 64, 5)) == Place(0, 0));
  CHECK(place(k_low_place(1, 3, 64, 5)) == Place(7, 0));
  CHECK(place(k_low_place(0, 4, 64, 5)) == Place(0, 4));
  CHECK(place(k_low_place(15, 13, 64, 5)) == Place(64 + 61, 4));
  CHECK(place(k_low_place(16, 8, 64, 5)) == Place(3 * 64, 0));
  CHECK(place(k_low_place(0, 16, 64, 5)) == Place(320, 0));
  CHECK(place(k_low_place(32, 0, 64, 5)) == Place(4 * 320, 0));
  CHECK(place(k_low_place(32, 0, 80, 4)) == Place(5 * 256, 0));
  CHECK(place(k_high_place(0, 0, 64, 5)) == Place(256, 0));
  CHECK(place(k_high_place(2, 14, 64, 5)) == Place(256 + 10, 3));
  CHECK(place(k_high_place(18, 14, 64, 5)) == Place(256 + 10, 7));
  CHECK(place(k_high_place(2, 14, 64, 6)) == Place(256 + 10, 6));
  CHECK(place(k_high_place(18, 14, 64, 6)) == Place(320 + 10, 6));
  CHECK(place(k_high_place(63, 63, 64, 6)) == Place(8 * 384 - 1, 6));
  for (const uint32_t bits : {4U, 5U, 6U}) {
    std::vector<uint8_t> codes(64 * 48 / 8 * bits);
    const auto code = [&](uint32_t token, uint32_t dim) {
      return (token * 5 + dim * 3) % (1U << bits);
    };
    for (uint32_t i = 0; i < 64 * 48; ++i) {
      k_put(codes.data(), i / 48, i % 48, 48, bits, code(i / 48, i % 48));
    }
    for (uint32_t i = 0; i < 64 * 48; ++i) {
      REQUIRE(k_get(codes.data(), i / 48, i % 48, 48, bits) == code(i / 48, i % 48));
    }
  }
}

TEST_CASE("V4 and V5 keep the quads of a group in nibbles, and V5 the fifth bits in a plane") {
  const auto place = [](CodePlace p) { return std::pair(p.offset, p.shift); };
  using Place = std::pair<uint64_t, uint32_t>;
  CHECK(place(v_low_place(0, 0, 64, 4)) == Place(0, 0));
  CHECK(place(v_low_place(33, 2, 64, 4)) == Place(9, 4));       // quad 1, lane 1
  CHECK(place(v_low_place(6, 0, 64, 4)) == Place(3 * 256, 0));  // quad 6: plane 3
  CHECK(place(v_low_place(8, 0, 64, 4)) == Place(4 * 256, 0));  // the second group
  CHECK(place(v_low_place(8, 0, 64, 5)) == Place(5 * 256, 0));
  CHECK(place(v_high_place(7, 1, 64)) == Place(4 * 256 + 4, 7));
  CHECK(place(v_high_place(63, 63, 64)) == Place(10 * 256 - 1, 7));
  for (const uint32_t bits : {3U, 4U, 5U}) {
    std::vector<uint8_t> codes(64 * 48 / 8 * bits);
    const auto code = [&](uint32_t token, uint32_t dim) {
      return (token * 5 + dim * 3) % (1U << bits);
    };
    for (uint32_t i = 0; i < 64 * 48; ++i) {
      v_put(codes.data(), i / 48, i % 48, 48, bits, code(i / 48, i % 48));
    }
    for (uint32_t i = 0; i < 64 * 48; ++i) {
      REQUIRE(v_get(codes.data(), i / 48, i % 48, 48, bits) == code(i / 48, i % 48));
    }
  }
}

TEST_CASE("levels and signs are those of version 1") {
  for (const Codebook& book : kCodebooks) {
    CHECK(book.size == 1U << book.bits);
    for (uint32_t code = 0; code < book.size; ++code) {
      CHECK(book.levels[code] == -book.levels[book.size - 1 - code]);
      if (code > 0) CHECK(book.levels[code] > book.levels[code - 1]);
    }
  }
  CHECK(codebook(3).levels[7] == 88);
  CHECK(codebook(4).levels[8] == 5);
  CHECK(codebook(5).levels[31] == 97);
  CHECK(codebook(6).levels[0] == -108);
  CHECK(kRotationSigns[0] == 0x72939daf1dc92328);
  CHECK(kRotationSigns[15] == 0xe4b27581a1df764a);
}

TEST_CASE("segments of a fixed input have the bytes that version 1 gave them") {
  const std::vector<LayerGeometry> powers_of_two = {{2, 16, 8, 0}, {1, 32, 64, 128}};
  const std::vector<LayerGeometry> multiples_of_16 = {{2, 80, 96, 0}, {1, 64, 112, 128}};
  struct Frozen {
    Profile profile;
    const std::vector<LayerGeometry>& geometry;
    uint64_t size_bytes;
    uint64_t checksum;
  };
  const Frozen frozen[] = {
      {Profile::exact, powers_of_two, 40960, 0x2dd5cadff62d6b7f},
      {Profile::k8v8, powers_of_two, 28672, 0x1d147d445df22feb},
      {Profile::paper_k8v3, powers_of_two, 20480, 0xf9a204dff4d65100},
      {Profile::k6v5, multiples_of_16, 57344, 0xf9190792515238b7},
      {Profile::k5v4, multiples_of_16, 49152, 0x305954a3dad150e7},
      {Profile::k8v3, multiples_of_16, 57344, 0xa8321db9734369d6},
      {Profile::k4v3, multiples_of_16, 40960, 0x9d846de29b5fe8ce},
  };
  for (const Frozen& want : frozen) {
    const std::vector<LayerGeometry>& geometry = want.geometry;
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
