// Damaged segments: open() gives an error or a view, and everything that reads the view stays
// inside the bytes. Meant for the address sanitizer: each mutated copy is an allocation of its
// exact size.
#include <catch2/catch.hpp>
#include <cstring>
#include <random>

#include "kernels/profiles.h"
#include "tests/support/require_ok.h"
#include "tests/support/segments.h"

using namespace polykv;
using namespace polykv::test;

namespace {

AlignedBytes small_segment(Profile profile) {
  const std::vector<LayerGeometry> geometry = {{1, 16, 32, 0}, {2, 48, 16, 32}};
  SegmentOptions options;
  options.has_certificate = true;
  options.chosen_exact_rows = 2;
  if (profile_rule(profile) != nullptr) options.chosen = {9, 66};
  return build_segment(test_spec(test_model(geometry), profile, 70, options),
                       {random_values(geometry[0], 70, 1), random_values(geometry[1], 70, 2)},
                       options);
}

struct Outcome {
  uint64_t opened = 0;
  uint64_t refused = 0;
  uint64_t other = 0;  // neither: an error that is not about the bytes
};

/// Opens, and reads all there is when that succeeds.
void exercise(const AlignedBytes& bytes, Outcome& outcome) {
  const Result<SegmentView> view = SegmentView::open(bytes.span());
  if (!view.is_ok()) {
    const polykv_status code = view.status().code();
    const bool about_bytes =
        code == POLYKV_ERR_CORRUPT || code == POLYKV_ERR_VERSION || code == POLYKV_ERR_UNSUPPORTED;
    ++(about_bytes && !view.status().message().empty() ? outcome.refused : outcome.other);
    return;
  }
  ++outcome.opened;
  static_cast<void>(view->verify_checksums().is_ok());
  uint32_t sum = 0;
  for (const uint32_t id : view->token_ids()) sum += id;
  sum += static_cast<uint32_t>(view->digests().size() + view->certificate().size());
  for (uint32_t layer = 0; layer < view->layer_count(); ++layer) {
    for (const Backend backend : {Backend::reference, Backend::cpu}) {
      sum += static_cast<uint32_t>(decode_all(*view, layer, backend).k.size());
    }
  }
  REQUIRE(sum != 0);
}

AlignedBytes copy_of(std::span<const uint8_t> bytes) {
  AlignedBytes copy(bytes.size());
  std::copy(bytes.begin(), bytes.end(), copy.span().begin());
  return copy;
}

}  // namespace

TEST_CASE("each byte of header and layer table changed in turn never leads out of range") {
  for (const Profile profile : kAllProfiles) {
    AlignedBytes bytes = small_segment(profile);
    const size_t end = sizeof(SegmentHeader) + 2 * sizeof(LayerRecord);
    Outcome outcome;
    for (size_t at = 0; at < end; ++at) {
      for (const uint8_t mask : {0x01, 0x80, 0xff}) {
        bytes.span()[at] ^= mask;
        exercise(bytes, outcome);
        bytes.span()[at] ^= mask;
      }
    }
    CHECK(outcome.other == 0);
    CHECK(outcome.refused > 3 * 500);
    // Scales, checksums and the parent digest are free to be anything.
    CHECK(outcome.opened > 0);
    exercise(bytes, outcome);
    CHECK_OK(open_segment(bytes).verify_checksums());
  }
}

TEST_CASE("a changed header or layer table that still opens fails its checksum") {
  AlignedBytes bytes = small_segment(Profile::k8v8);
  for (size_t at = 0; at < sizeof(SegmentHeader) + 2 * sizeof(LayerRecord); ++at) {
    bytes.span()[at] ^= 0x40;
    const Result<SegmentView> view = SegmentView::open(bytes.span());
    if (view.is_ok()) REQUIRE(view->verify_checksums().code() == POLYKV_ERR_CORRUPT);
    bytes.span()[at] ^= 0x40;
  }
}

TEST_CASE("seeded mutations of fields and payload never lead out of range") {
  constexpr uint32_t kSeed = 20240607;
  INFO("seed " << kSeed);
  std::mt19937 engine(kSeed);
  const uint64_t interesting[] = {0,          1,          3,          63,         64,
                                  65,         255,        4096,       0x7fffffff, 0x80000000,
                                  0xffffffff, 1ULL << 32, 1ULL << 40, 1ULL << 63, ~uint64_t{0}};
  for (const Profile profile : kAllProfiles) {
    const AlignedBytes original = small_segment(profile);
    const size_t table_end = sizeof(SegmentHeader) + 2 * sizeof(LayerRecord);
    Outcome outcome;
    for (int round = 0; round < 1300; ++round) {
      AlignedBytes bytes = copy_of(original.span());
      const uint32_t changes = 1 + engine() % 3;
      for (uint32_t i = 0; i < changes; ++i) {
        const bool in_payload = engine() % 3 == 0;
        const size_t limit = in_payload ? bytes.span().size() : table_end;
        const size_t width = engine() % 2 == 0 ? 4 : 8;
        const size_t at = engine() % (limit / width) * width;
        const uint64_t value = engine() % 2 == 0 ? interesting[engine() % std::size(interesting)]
                                                 : (uint64_t{engine()} << 32 | engine());
        std::memcpy(bytes.span().data() + at, &value, width);
      }
      exercise(bytes, outcome);
    }
    CHECK(outcome.other == 0);
    CHECK(outcome.refused > 0);
    CHECK(outcome.opened > 0);
  }
}

TEST_CASE("a list of exact rows that lies is ignored, not followed") {
  AlignedBytes bytes = small_segment(Profile::k8v8);
  const uint64_t list = open_segment(bytes).layer_record(0).exact_tokens_offset;
  for (const uint32_t lie : {70U, 71U, 0x7fffffffU, 0xffffffffU}) {
    std::memcpy(bytes.span().data() + list, &lie, sizeof lie);
    Outcome outcome;
    exercise(bytes, outcome);
    CHECK(outcome.opened == 1);
  }
}

TEST_CASE("a segment cut anywhere in its header, table or data is refused") {
  const AlignedBytes original = small_segment(Profile::k8v8);
  const size_t table_end = sizeof(SegmentHeader) + 2 * sizeof(LayerRecord);
  for (size_t length = 0; length < original.span().size();
       length += length < table_end + 64 ? 1 : 509) {
    const AlignedBytes cut = copy_of(original.span().first(length));
    const Result<SegmentView> view = SegmentView::open(cut.span());
    REQUIRE(!view.is_ok());
    REQUIRE(view.status().code() == POLYKV_ERR_CORRUPT);
  }
}
