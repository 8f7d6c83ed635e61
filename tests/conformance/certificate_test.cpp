// The quality certificate against attention computed here, exact rows and profiles that follow from
// it, and segments whose layers have different profiles.
#include "kernels/certificate.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "tests/support/relative_error.h"
#include "tests/support/require_ok.h"
#include "tests/support/segments.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Queries [row, head, dim].
struct TestQueries {
  uint32_t heads;
  uint32_t rows;
  uint32_t dim;
  std::vector<float> q;

  TestQueries(uint32_t heads, uint32_t rows, uint32_t dim, uint32_t seed = 5)
      : heads(heads), rows(rows), dim(dim), q(size_t{heads} * rows * dim) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    for (float& value : q) value = normal(engine);
  }
  LayerQueries view() const {
    return {Dtype::f32, q.data(), {dim, int64_t{heads} * dim, 1}, heads, rows, 0, 0};
  }
};

/// Attention in double precision, [head, row, v_head_dim].
std::vector<double> attend(const LayerValues& layer, const TestQueries& queries, float soft_cap) {
  const LayerGeometry& g = layer.geometry;
  std::vector<double> outputs;
  for (uint32_t head = 0; head < queries.heads; ++head) {
    const uint64_t kv_head = head / (queries.heads / g.kv_head_count);
    for (uint32_t row = 0; row < queries.rows; ++row) {
      const uint64_t end = layer.token_count - queries.rows + row + 1;
      const uint64_t begin =
          g.sliding_window == 0 || g.sliding_window > end ? 0 : end - g.sliding_window;
      const float* q = &queries.q[(size_t{row} * queries.heads + head) * g.k_head_dim];
      std::vector<double> output(g.v_head_dim);
      double sum = 0;
      for (uint64_t token = begin; token < end; ++token) {
        const uint64_t at = kv_head * layer.token_count + token;
        double logit = 0;
        for (uint32_t i = 0; i < g.k_head_dim; ++i)
          logit += double{q[i]} * double{layer.k[at * g.k_head_dim + i]};
        logit /= std::sqrt(double(g.k_head_dim));
        if (soft_cap > 0) logit = soft_cap * std::tanh(logit / soft_cap);
        sum += std::exp(logit);
        for (uint32_t i = 0; i < g.v_head_dim; ++i)
          output[i] += std::exp(logit) * double{layer.v[at * g.v_head_dim + i]};
      }
      for (const double value : output) outputs.push_back(value / sum);
    }
  }
  return outputs;
}

LayerSpec spec_of(const LayerValues& layer, Profile profile, uint64_t first_token = 0) {
  return {layer.geometry, Dtype::f32, profile, first_token, layer.token_count};
}

LayerChoice examined(const LayerSpec& spec, const LayerValues& layer, const LayerQueries& queries) {
  Result<LayerChoice> choice = examine_layer(spec, layer.source(), queries);
  INFO(choice.status().message());
  REQUIRE_OK(choice);
  return std::move(choice).value();
}

/// What a reader of the layer, encoded as chosen, decodes.
LayerValues through_segment(const LayerValues& layer, const LayerChoice& choice) {
  SegmentOptions options;
  options.chosen_exact_rows = static_cast<uint32_t>(choice.exact_tokens.size());
  options.chosen = choice.exact_tokens;
  const AlignedBytes bytes = build_segment(
      test_spec(test_model({layer.geometry}), choice.profile, layer.token_count, options), {layer},
      options);
  const Result<SegmentView> view = SegmentView::open(bytes.span());
  REQUIRE_OK(view);
  LayerValues decoded = empty_values(layer.geometry, layer.token_count);
  const KvSource source = decoded.source();
  REQUIRE_OK(decode_layer(*view, 0,
                          {0, layer.token_count, Dtype::f32, decoded.k.data(), source.k_strides,
                           decoded.v.data(), source.v_strides}));
  return decoded;
}

/// As models have them: V has a part that all tokens share, so that outputs do not average out.
LayerValues ordinary_values(const LayerGeometry& geometry, uint64_t token_count) {
  LayerValues values = random_values(geometry, token_count, 11);
  for (size_t i = 0; i < values.v.size(); ++i)
    values.v[i] += 2 * std::cos(static_cast<float>(i % geometry.v_head_dim));
  return values;
}

/// Keys with a large part that turns with the position.
LayerValues hostile_values(const LayerGeometry& geometry, uint64_t token_count) {
  LayerValues values = ordinary_values(geometry, token_count);
  for (size_t row = 0; row < values.k.size() / geometry.k_head_dim; ++row) {
    const double angle = 0.03 * static_cast<double>(row % token_count);
    values.k[row * geometry.k_head_dim] += 500 * static_cast<float>(std::cos(angle));
    values.k[row * geometry.k_head_dim + 1] += 500 * static_cast<float>(std::sin(angle));
  }
  return values;
}

/// That do not look where the keys are hostile.
TestQueries blind_queries(uint32_t heads, uint32_t rows, uint32_t dim) {
  TestQueries queries(heads, rows, dim);
  for (size_t i = 0; i < queries.q.size(); i += dim) queries.q[i] = queries.q[i + 1] = 0;
  return queries;
}

}  // namespace

TEST_CASE("a certificate is the error of the queries' attention with what a reader decodes") {
  struct Case {
    LayerGeometry geometry;
    Profile profile;
    float soft_cap;
  };
  for (const Case& c :
       {Case{{2, 64, 32, 0}, Profile::k5v4, 0}, Case{{1, 32, 64, 100}, Profile::k4v3, 0},
        Case{{3, 48, 48, 0}, Profile::k8v3, 1.5F}, Case{{1, 64, 64, 0}, Profile::paper_k8v3, 0},
        Case{{2, 20, 12, 33}, Profile::k8v8, 0}}) {
    const LayerValues layer = ordinary_values(c.geometry, 601);
    const TestQueries queries(2 * c.geometry.kv_head_count, 19, c.geometry.k_head_dim);
    LayerQueries view = queries.view();
    view.soft_cap = c.soft_cap;
    const LayerChoice choice = examined(spec_of(layer, c.profile), layer, view);
    CHECK(choice.profile == c.profile);
    CHECK(choice.certificate.query_count == 19);
    const double expected =
        relative_error(attend(through_segment(layer, choice), queries, c.soft_cap),
                       attend(layer, queries, c.soft_cap));
    CAPTURE(profile_name(c.profile), expected);
    CHECK(expected > 0.001);
    CHECK(choice.certificate.relative_error == Approx(expected).epsilon(2e-3));
  }
}

TEST_CASE("a certificate does not depend on the dtype and strides of what it is given") {
  const LayerGeometry geometry{2, 32, 32, 0};
  const LayerValues layer = ordinary_values(geometry, 200);
  const TestQueries queries(4, 8, 32);
  const float expected =
      examined(spec_of(layer, Profile::k5v4), layer, queries.view()).certificate.relative_error;
  // Rounded to bf16 as both dtypes, dims apart by 3.
  std::vector<uint16_t> narrow(queries.q.size() * 3);
  std::vector<float> wide(queries.q.size());
  for (size_t i = 0; i < wide.size(); ++i) {
    wide[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(queries.q[i]) & 0xffff0000U);
    narrow[3 * i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(queries.q[i]) >> 16);
  }
  LayerQueries as_f32 = queries.view();
  as_f32.q = wide.data();
  LayerQueries as_bf16{Dtype::bf16, narrow.data(), {3 * 32, 3 * 4 * 32, 3}, 4, 8, 0, 0};
  const LayerSpec spec = spec_of(layer, Profile::k5v4);
  const float rounded = examined(spec, layer, as_f32).certificate.relative_error;
  CHECK(examined(spec, layer, as_bf16).certificate.relative_error == rounded);
  CHECK(rounded == Approx(expected).epsilon(0.05));
}

TEST_CASE("an exact layer has an error of 0 and no exact rows") {
  const LayerValues layer = ordinary_values({1, 32, 32, 0}, 300);
  const LayerChoice choice =
      examined(spec_of(layer, Profile::exact), layer, TestQueries(2, 4, 32).view());
  CHECK(choice.certificate.relative_error == 0);
  CHECK(choice.exact_tokens.empty());
}

TEST_CASE("the tokens that draw the most attention are kept exact, behind the document's first") {
  const LayerGeometry geometry{1, 64, 64, 0};
  LayerValues layer = ordinary_values(geometry, 640);
  const TestQueries queries(1, 1, 64);
  for (const uint32_t token : {2U, 77U, 300U, 501U}) {
    for (uint32_t i = 0; i < 64; ++i) layer.k[token * 64 + i] = 2 * queries.q[i];
  }
  // 640 tokens may have five.
  const LayerChoice choice = examined(spec_of(layer, Profile::k5v4), layer, queries.view());
  REQUIRE(choice.exact_tokens.size() == 5);
  for (const uint32_t token : {77U, 300U, 501U}) {
    CHECK(std::binary_search(choice.exact_tokens.begin(), choice.exact_tokens.end(), token));
  }
  CHECK(choice.exact_tokens.front() >= 4);
  CHECK(std::is_sorted(choice.exact_tokens.begin(), choice.exact_tokens.end()));
  // In a later segment, token 2 is like any other.
  const LayerChoice later = examined(spec_of(layer, Profile::k5v4, 256), layer, queries.view());
  CHECK(later.exact_tokens.front() == 2);
  CHECK(examined(spec_of(ordinary_values(geometry, 127), Profile::k5v4),
                 ordinary_values(geometry, 127), queries.view())
            .exact_tokens.empty());
}

TEST_CASE("auto leaves an ordinary layer in its first profile and promotes a hostile one") {
  const LayerGeometry geometry{1, 64, 64, 0};
  const TestQueries queries = blind_queries(2, 16, 64);
  const LayerValues ordinary = ordinary_values(geometry, 512);
  const LayerChoice plain =
      examined(spec_of(ordinary, Profile::automatic), ordinary, queries.view());
  CHECK(plain.profile == kAutoLadder[0]);
  CHECK(plain.certificate.relative_error <= kCertificateThreshold);

  const LayerValues hostile = hostile_values(geometry, 512);
  CHECK(examined(spec_of(hostile, kAutoLadder[0]), hostile, queries.view())
            .certificate.relative_error > kCertificateThreshold);
  const LayerChoice promoted =
      examined(spec_of(hostile, Profile::automatic), hostile, queries.view());
  CHECK(promoted.profile != kAutoLadder[0]);
  CHECK(promoted.certificate.relative_error <= kCertificateThreshold);
}

TEST_CASE("auto gives a layer only profiles that can hold it") {
  for (const auto& [dim, profile] : {std::pair{20U, Profile::k8v8}, {6U, Profile::exact}}) {
    const LayerValues layer = ordinary_values({1, dim, dim, 0}, 200);
    const LayerChoice choice =
        examined(spec_of(layer, Profile::automatic), layer, TestQueries(1, 4, dim).view());
    CHECK(choice.profile == profile);
  }
}

TEST_CASE("queries of another shape, and values that are no numbers, are refused by name") {
  const LayerValues layer = ordinary_values({2, 32, 32, 0}, 100);
  const LayerSpec spec = spec_of(layer, Profile::k5v4);
  const TestQueries queries(4, 8, 32);
  const auto refused = [&](auto change, const LayerValues& values, const char* text) {
    LayerQueries view = queries.view();
    change(view);
    const Status status = examine_layer(spec, values.source(), view).status();
    CHECK(status.code() == POLYKV_ERR_INVALID_ARGUMENT);
    INFO(status.message());
    CHECK(status.message().find(text) != std::string::npos);
  };
  refused([](LayerQueries& q) { q.q = nullptr; }, layer, "missing");
  refused([](LayerQueries& q) { q.head_count = 3; }, layer, "3 heads");
  refused([](LayerQueries& q) { q.head_count = 0; }, layer, "0 heads");
  refused([](LayerQueries& q) { q.row_count = 0; }, layer, "0 rows");
  refused([](LayerQueries& q) { q.row_count = 101; }, layer, "101 rows");
  refused([](LayerQueries& q) { q.scale = kNan; }, layer, "scale");
  refused([](LayerQueries& q) { q.soft_cap = -1; }, layer, "soft-cap");
  TestQueries bad = queries;
  bad.q[(3 * 4 + 2) * 32 + 7] = kNan;
  refused([&](LayerQueries& q) { q.q = bad.q.data(); }, layer, "row 3 of head 2");
  bad.q.assign(bad.q.size(), 1e30F);
  LayerValues large = layer;
  large.k.assign(large.k.size(), 1e30F);
  refused([&](LayerQueries& q) { q.q = bad.q.data(); }, large, "beyond fp32");
  LayerValues broken = layer;
  broken.k[(100 + 17) * 32] = kNan;
  refused([](LayerQueries&) {}, broken, "K of token 17, kv_head 1");
  broken = layer;
  broken.v[17 * 32] = std::numeric_limits<float>::infinity();
  refused([](LayerQueries&) {}, broken, "V of token 17, kv_head 0");
}

TEST_CASE("layers of an auto segment have their own profiles, and every reader finds them") {
  const std::vector<LayerGeometry> geometries(4, {1, 64, 64, 0});
  const std::vector<LayerValues> layers(4, ordinary_values(geometries[0], 400));
  SegmentOptions options;
  options.chosen_exact_rows = 3;
  options.chosen = {};
  SegmentSpec spec = test_spec(test_model(geometries), Profile::automatic, 400, options);
  spec.layer_profiles = {Profile::exact, Profile::k5v4, Profile::k8v8, Profile::k4v3};
  AlignedBytes bytes = build_segment(spec, layers, options);
  const Result<SegmentView> view = SegmentView::open(bytes.span());
  INFO(view.status().message());
  REQUIRE_OK(view);
  REQUIRE_OK(view->verify_checksums());
  CHECK(view->profile() == Profile::automatic);
  for (uint32_t i = 0; i < 4; ++i) {
    CHECK(view->layer(i).profile == spec.layer_profiles[i]);
    CHECK(view->layer(i).exact_row_capacity == (i == 0 ? 0 : 7));
    LayerValues decoded = empty_values(geometries[0], 400);
    const KvSource strides = decoded.source();
    REQUIRE_OK(decode_layer(*view, i,
                            {0, 400, Dtype::f32, decoded.k.data(), strides.k_strides,
                             decoded.v.data(), strides.v_strides}));
    double error = 0;
    for (size_t k = 0; k < decoded.v.size(); ++k)
      error = std::max(error, std::abs(double{decoded.v[k]} - double{layers[i].v[k]}));
    CHECK((i == 0 ? error == 0 : error < 3));
  }
  // The profile of a layer decides where everything behind it is.
  const size_t at = sizeof(SegmentHeader) + sizeof(LayerRecord) + offsetof(LayerRecord, profile);
  bytes.span()[at] = static_cast<uint8_t>(Profile::k6v5);
  CHECK(SegmentView::open(bytes.span()).status().code() == POLYKV_ERR_CORRUPT);
  bytes.span()[at] = static_cast<uint8_t>(Profile::automatic);
  CHECK(SegmentView::open(bytes.span()).status().code() == POLYKV_ERR_UNSUPPORTED);
}

TEST_CASE("layer profiles that no segment can have are refused") {
  const auto refusal = [](Profile profile, std::vector<Profile> layers) {
    SegmentSpec spec = test_spec(test_model({{1, 64, 64, 0}, {1, 64, 64, 0}}), profile, 100);
    spec.layer_profiles = std::move(layers);
    return plan_segment(spec).status().code();
  };
  using enum Profile;
  CHECK(refusal(automatic, {k5v4, exact}) == POLYKV_OK);
  CHECK(refusal(automatic, {k5v4}) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(refusal(automatic, {}) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(refusal(k5v4, {k5v4, k5v4}) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(refusal(automatic, {k5v4, paper_k8v3}) == POLYKV_ERR_UNSUPPORTED);
  CHECK(refusal(automatic, {automatic, k5v4}) == POLYKV_ERR_UNSUPPORTED);
  CHECK(refusal(automatic, {k5v4, static_cast<Profile>(200)}) == POLYKV_ERR_UNSUPPORTED);
}

TEST_CASE("a document of 4,096 tokens keeps its ratio with certificate and chosen rows") {
  const auto ratio = [](Profile profile) {
    SegmentSpec spec =
        test_spec(test_model(std::vector<LayerGeometry>(30, {3, 64, 64, 0})), profile, 4096);
    spec.has_certificate = true;
    spec.chosen_exact_rows = max_chosen_exact_rows(4096);
    const double bf16_bytes = 2.0 * 2 * 30 * 3 * 64 * 4096;
    return bf16_bytes / static_cast<double>(*segment_size_bytes(spec));
  };
  CHECK(ratio(Profile::k5v4) >= 3.3);
  CHECK(ratio(Profile::k4v3) >= 4.1);
  CHECK(ratio(Profile::k8v3) >= 2.7);
}
