#include "kernels/segment.h"
#include "tests/support/require_ok.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <thread>

#include "tests/support/segments.h"

using namespace polykv;
using namespace polykv::test;

namespace {

const LayerGeometry kGeometry{2, 64, 80, 0};

SegmentSpec sample_spec(Profile profile = Profile::k8v8, const SegmentOptions& options = {}) {
  return test_spec(test_model({kGeometry, {3, 96, 64, 512}}), profile, 300, options);
}

std::vector<LayerValues> sample_layers() {
  return {random_values(kGeometry, 300, 1), random_values({3, 96, 64, 512}, 300, 2)};
}

polykv_status plan_code(const SegmentSpec& spec) {
  const Result<SegmentLayout> layout = plan_segment(spec);
  return layout.is_ok() ? POLYKV_OK : layout.status().code();
}

}  // namespace

TEST_CASE("a finished segment opens, verifies and gives back what it was made of") {
  SegmentOptions options;
  options.first_token = 512;
  options.has_certificate = true;
  options.chosen_exact_rows = 3;
  const SegmentSpec spec = sample_spec(Profile::k8v8, options);
  AlignedBytes bytes(*segment_size_bytes(spec));
  const std::vector<uint32_t> ids = test_ids(300);
  const std::vector<Digest> digests = chain_digests(chain_root(spec.identity), ids);
  Digest parent{};
  parent[5] = 9;
  Result<SegmentWriter> writer = SegmentWriter::create(
      spec, {ids, parent, digests, PrefixTreatment::recomputed}, bytes.span());
  REQUIRE_OK(writer);
  const std::vector<LayerValues> layers = sample_layers();
  const std::vector<uint32_t> chosen = {7, 99, 299};
  REQUIRE_OK(writer->encode_layer(1, layers[1].source(), chosen));
  CHECK(writer->finish().code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(!SegmentView::open(bytes.span()).is_ok());
  REQUIRE_OK(writer->encode_layer(0, layers[0].source()));
  CHECK(!writer->encode_layer(0, layers[0].source()).is_ok());
  CHECK(!writer->encode_layer(2, layers[0].source()).is_ok());
  REQUIRE_OK(writer->set_certificate(1, 0.25F, 16));
  REQUIRE_OK(writer->finish());

  const SegmentView view = open_segment(bytes);
  CHECK_OK(view.verify_checksums());
  CHECK(view.profile() == Profile::k8v8);
  CHECK(view.first_token() == 512);
  CHECK(view.token_count() == 300);
  CHECK(view.layer_count() == 2);
  CHECK(view.prefix() == PrefixTreatment::recomputed);
  CHECK(std::equal(ids.begin(), ids.end(), view.token_ids().begin(), view.token_ids().end()));
  CHECK(view.digests() == digests);
  CHECK(view.parent_digest() == parent);
  CHECK(view.root_digest() == chain_root(spec.identity));
  CHECK(view.identity().layers == spec.identity.layers);
  CHECK(view.identity().rope == spec.identity.rope);
  CHECK(view.identity().fingerprint == spec.identity.fingerprint);
  CHECK(view.layer(0).exact_row_count == 0);
  CHECK(view.layer(1).exact_row_count == 3);
  CHECK(view.layer(1).exact_tokens[1] == 99);
  REQUIRE(view.certificate().size() == 2);
  CHECK(view.certificate()[1].relative_error == 0.25F);
  CHECK(view.certificate()[1].query_count == 16);
  CHECK(view.certificate()[0].query_count == 0);
  CHECK(view.bytes().size() % kSegmentPageBytes == 0);
}

TEST_CASE("layers encoded on several threads give the bytes of one thread") {
  const SegmentSpec spec =
      test_spec(test_model(std::vector<LayerGeometry>(8, kGeometry)), Profile::k8v8, 200);
  const std::vector<LayerValues> layers(8, random_values(kGeometry, 200, 3));
  const AlignedBytes alone = build_segment(spec, layers);
  AlignedBytes bytes(alone.span().size());
  const std::vector<uint32_t> ids = test_ids(200);
  std::vector<Digest> digests(spec.digest_count);
  digests[0].fill(1);
  Result<SegmentWriter> writer =
      SegmentWriter::create(spec, {ids, chain_root(spec.identity), digests, {}}, bytes.span());
  REQUIRE_OK(writer);
  std::vector<std::thread> threads;
  std::vector<Status> results(8);
  for (uint32_t layer = 0; layer < 8; ++layer) {
    threads.emplace_back(
        [&, layer] { results[layer] = writer->encode_layer(layer, layers[layer].source()); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& result : results) CHECK_OK(result);
  REQUIRE_OK(writer->finish());
  CHECK(std::equal(bytes.span().begin(), bytes.span().end(), alone.span().begin()));
}

TEST_CASE("a checksum finds a changed bit of the header area and of each layer, and names it") {
  AlignedBytes bytes = build_segment(sample_spec(), sample_layers());
  const SegmentView view = open_segment(bytes);
  const uint64_t ids = view.header().token_ids_offset;
  bytes.span()[ids] ^= 1;
  CHECK(view.verify_header_checksum().code() == POLYKV_ERR_CORRUPT);
  CHECK(view.verify_checksums().code() == POLYKV_ERR_CORRUPT);
  bytes.span()[ids] ^= 1;
  CHECK_OK(view.verify_checksums());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const uint64_t last =
        view.layer_record(layer).payload_offset + view.layer_record(layer).payload_bytes - 1;
    bytes.span()[last] ^= 0x80;
    const Status status = view.verify_checksums();
    CHECK(status.code() == POLYKV_ERR_CORRUPT);
    CHECK(status.message().find("layer " + std::to_string(layer)) != std::string::npos);
    bytes.span()[last] ^= 0x80;
  }
}

TEST_CASE("another format version is refused, naming both") {
  AlignedBytes bytes = build_segment(sample_spec(), sample_layers());
  const uint32_t version = 7;
  std::memcpy(bytes.span().data() + offsetof(SegmentHeader, format_version), &version,
              sizeof version);
  const Result<SegmentView> view = SegmentView::open(bytes.span());
  REQUIRE(!view.is_ok());
  CHECK(view.status().code() == POLYKV_ERR_VERSION);
  CHECK(view.status().message().find("version 7") != std::string::npos);
  CHECK(view.status().message().find("version 1") != std::string::npos);
}

TEST_CASE("misaligned bytes and a truncated object are refused") {
  const AlignedBytes bytes = build_segment(sample_spec(), sample_layers());
  CHECK(SegmentView::open(bytes.span().subspan(1)).status().code() == POLYKV_ERR_INVALID_ARGUMENT);
  const size_t size = bytes.span().size();
  CHECK(SegmentView::open(bytes.span().first(size - 1)).status().code() == POLYKV_ERR_CORRUPT);
  CHECK(SegmentView::open({}).status().code() == POLYKV_ERR_CORRUPT);
}

TEST_CASE("a plan refuses what no segment can be") {
  const auto code = [](auto change) {
    SegmentSpec spec = sample_spec();
    change(spec);
    return plan_code(spec);
  };
  CHECK(code([](SegmentSpec&) {}) == POLYKV_OK);
  CHECK(code([](SegmentSpec& s) { s.token_count = 0; }) == POLYKV_ERR_EMPTY_DOCUMENT);
  CHECK(code([](SegmentSpec& s) { s.token_count = kMaxTokens + 1; }) == POLYKV_ERR_LIMIT);
  CHECK(code([](SegmentSpec& s) { s.first_token = ~uint64_t{0}; }) == POLYKV_ERR_LIMIT);
  CHECK(code([](SegmentSpec& s) { s.first_token = kMaxTokens; }) == POLYKV_ERR_LIMIT);
  CHECK(code([](SegmentSpec& s) { s.identity.layers.clear(); }) == POLYKV_ERR_LIMIT);
  CHECK(code([](SegmentSpec& s) { s.identity.layers.resize(1025, kGeometry); }) ==
        POLYKV_ERR_LIMIT);
  CHECK(code([](SegmentSpec& s) { s.identity.layers[0].kv_head_count = 0; }) == POLYKV_ERR_LIMIT);
  CHECK(code([](SegmentSpec& s) { s.identity.layers[1].k_head_dim = 1025; }) == POLYKV_ERR_LIMIT);
  CHECK(code([](SegmentSpec& s) { s.identity.layers[1].v_head_dim = ~0U; }) == POLYKV_ERR_LIMIT);
  CHECK(code([](SegmentSpec& s) { s.identity.layers[1].k_head_dim = 66; }) ==
        POLYKV_ERR_UNSUPPORTED);
  CHECK(code([](SegmentSpec& s) { s.identity.source_dtype = Dtype{9}; }) ==
        POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(code([](SegmentSpec& s) { s.identity.rope.kind = RopeKind{9}; }) ==
        POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(code([](SegmentSpec& s) { s.identity.rope.theta = 1.0 / 0.0; }) ==
        POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(code([](SegmentSpec& s) { s.digest_count = 3; }) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(code([](SegmentSpec& s) { s.chosen_exact_rows = 5000; }) == POLYKV_ERR_LIMIT);
  CHECK(code([](SegmentSpec& s) { s.profile = Profile::any; }) == POLYKV_ERR_UNSUPPORTED);
  CHECK(code([](SegmentSpec& s) {
          s.identity.layers.assign(1024, {1024, 1024, 1024, 0});
          s.token_count = kMaxTokens;
          s.digest_count = segment_digest_count(0, kMaxTokens, false);
        }) == POLYKV_ERR_LIMIT);
}

TEST_CASE("a profile without a codec is refused by number") {
  const auto unknown = static_cast<Profile>(9);
  CHECK(codec_for(unknown) == nullptr);
  const Result<uint64_t> size = segment_size_bytes(sample_spec(unknown));
  REQUIRE(!size.is_ok());
  CHECK(size.status().code() == POLYKV_ERR_UNSUPPORTED);
  CHECK(size.status().message().find("'unknown' (9)") != std::string::npos);
}

TEST_CASE("rotated K and V are of multiples of 16, and the profile says so") {
  const auto message = [](Profile profile, uint32_t k_head_dim, uint32_t v_head_dim) {
    const SegmentSpec spec = test_spec(test_model({{2, k_head_dim, v_head_dim, 0}}), profile, 100);
    const Status status = segment_size_bytes(spec).status();
    CHECK(status.code() == POLYKV_ERR_UNSUPPORTED);
    return status.message();
  };
  CHECK(message(Profile::k5v4, 72, 64).find("k5v4 rotates K") != std::string::npos);
  CHECK(message(Profile::k5v4, 64, 72).find("72; use exact") != std::string::npos);
  CHECK(message(Profile::k8v3, 64, 72).find("k8v3 rotates V") != std::string::npos);
  CHECK(message(Profile::k8v3, 66, 64).find("multiple of 4") != std::string::npos);
  CHECK_OK(segment_size_bytes(test_spec(test_model({{2, 68, 80, 0}}), Profile::k8v3, 100)));
}

TEST_CASE("a block of head_dim 64 takes the bits that its profile says, gains and all") {
  const auto bits = [](Profile profile) {
    const LayerGeometry geometry{1, 64, 64, 0};
    const uint64_t bytes = codec_for(profile)->block_bytes(profile, geometry, Dtype::f32);
    CHECK(bytes % 64 == 0);
    return static_cast<double>(bytes) * 8 / (64 * 128);
  };
  CHECK(bits(Profile::k8v8) == 8.25);
  CHECK(bits(Profile::k6v5) == 5.75);
  CHECK(bits(Profile::k5v4) == 4.75);
  CHECK(bits(Profile::k8v3) == 5.75);
  CHECK(bits(Profile::k4v3) == 3.75);
}

TEST_CASE("paper-k8v3 is one segment from token 0 on and of powers of two, and says so") {
  SegmentOptions later;
  later.first_token = 256;
  SegmentSpec spec = test_spec(test_model({{2, 64, 64, 0}}), Profile::paper_k8v3, 100, later);
  const Status not_first = segment_size_bytes(spec).status();
  CHECK(not_first.code() == POLYKV_ERR_UNSUPPORTED);
  CHECK(not_first.message().find("paper-k8v3") != std::string::npos);
  CHECK(codec_for(Profile::paper_k8v3)->single_segment_only);
  for (const uint32_t dim : {80U, 96U, 112U, 192U, 4U}) {
    spec = test_spec(test_model({{2, 64, dim, 0}}), Profile::paper_k8v3, 100);
    const Status status = segment_size_bytes(spec).status();
    CHECK(status.code() == POLYKV_ERR_UNSUPPORTED);
    CHECK(status.message().find(std::to_string(dim)) != std::string::npos);
  }
}

TEST_CASE("chain digests are counted per boundary of 256 and at the document's end") {
  CHECK(segment_digest_count(0, 255, false) == 0);
  CHECK(segment_digest_count(0, 255, true) == 1);
  CHECK(segment_digest_count(0, 256, false) == 1);
  CHECK(segment_digest_count(0, 256, true) == 1);
  CHECK(segment_digest_count(700, 800, false) == 3);  // 768, 1024, 1280
  CHECK(segment_digest_count(700, 800, true) == 4);
  CHECK(segment_digest_count(256, 256, false) == 1);
}

TEST_CASE("documents with SmolLM2's geometry are as much smaller than bf16 as their profiles say") {
  struct Ratio {
    Profile profile;
    double least;
  };
  const auto ratio = GENERATE(Ratio{Profile::paper_k8v3, 2.8}, Ratio{Profile::k5v4, 3.3},
                              Ratio{Profile::k4v3, 4.1}, Ratio{Profile::k8v3, 2.7});
  for (const uint64_t tokens : {uint64_t{7639}, uint64_t{4096}}) {
    const ModelIdentity model = test_model(std::vector<LayerGeometry>(30, {3, 64, 64, 0}));
    const uint64_t size = *segment_size_bytes(test_spec(model, ratio.profile, tokens));
    const uint64_t bf16_bytes = tokens * 30 * 3 * 128 * 2;
    CHECK(static_cast<double>(bf16_bytes) >= ratio.least * static_cast<double>(size));
  }
}

TEST_CASE("wrong contents, too few bytes and wrong exact rows are refused") {
  SegmentOptions options;
  options.chosen_exact_rows = 2;
  const SegmentSpec spec = sample_spec(Profile::k8v8, options);
  AlignedBytes bytes(*segment_size_bytes(spec));
  const std::vector<uint32_t> ids = test_ids(300);
  const std::vector<Digest> digests(spec.digest_count);
  const auto create = [&](std::span<const uint32_t> i, std::span<const Digest> d,
                          std::span<uint8_t> b) {
    return SegmentWriter::create(spec, {i, {}, d, {}}, b);
  };
  CHECK(!create(std::span(ids).first(299), digests, bytes.span()).is_ok());
  CHECK(!create(ids, {}, bytes.span()).is_ok());
  CHECK(!create(ids, digests, bytes.span().first(bytes.span().size() - 1)).is_ok());
  CHECK(!create(ids, digests, bytes.span().subspan(4)).is_ok());
  Result<SegmentWriter> writer = create(ids, digests, bytes.span());
  REQUIRE_OK(writer);
  const std::vector<LayerValues> layers = sample_layers();
  const auto encode = [&](std::vector<uint32_t> chosen) {
    return writer->encode_layer(0, layers[0].source(), chosen).code();
  };
  CHECK(encode({300}) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(encode({9, 9}) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(encode({9, 8}) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(encode({7, 8, 9}) == POLYKV_ERR_INVALID_ARGUMENT);
  KvSource source = layers[0].source();
  source.v = nullptr;
  CHECK(!writer->encode_layer(0, source).is_ok());
  CHECK(encode({2, 8, 9}) == POLYKV_OK);  // 2 is among the first four and needs no room
}

TEST_CASE("a decode outside the segment is refused") {
  const AlignedBytes bytes = build_segment(sample_spec(), sample_layers());
  const SegmentView view = open_segment(bytes);
  std::vector<float> out(300 * 64 * 3);
  const auto decode = [&](uint32_t layer, uint64_t first, uint64_t count,
                          Dtype dtype = Dtype::f32) {
    DecodeTarget target;
    target.first_token = first;
    target.token_count = count;
    target.dtype = dtype;
    target.k = out.data();
    target.k_strides = {0, 64, 1};
    return decode_layer(view, layer, target).code();
  };
  CHECK(decode(0, 0, 300) == POLYKV_OK);
  CHECK(decode(0, 300, 0) == POLYKV_OK);
  CHECK(decode(0, 0, 301) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(decode(0, 299, 2) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(decode(0, ~uint64_t{0}, 2) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(decode(0, 2, ~uint64_t{0}) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(decode(2, 0, 1) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(decode(0, 0, 1, Dtype{0}) == POLYKV_ERR_INVALID_ARGUMENT);
}
