// All codecs on both backends: round trips, shapes, strides, ranges, extreme values.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/half.h"
#include "kernels/profiles.h"
#include "tests/support/relative_error.h"
#include "tests/support/require_ok.h"
#include "tests/support/segments.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr Backend kBackends[] = {Backend::reference, Backend::cpu};

AlignedBytes encode_one(const LayerValues& values, Profile profile, Backend backend,
                        Dtype source_dtype = Dtype::f32) {
  SegmentOptions options;
  options.backend = backend;
  return build_segment(
      test_spec(test_model({values.geometry}, source_dtype), profile, values.token_count), {values},
      options);
}

LayerValues round_trip(const LayerValues& values, Profile profile, Backend backend) {
  const AlignedBytes bytes = encode_one(values, profile, backend);
  return decode_all(open_segment(bytes), 0, backend);
}

/// The largest error of each row against that row's largest value, over all rows.
double worst_row_error(const std::vector<float>& got, const std::vector<float>& want, uint32_t dim,
                       bool squared) {
  double worst = 0;
  for (size_t row = 0; row < want.size() / dim; ++row) {
    double error = 0;
    double size = 0;
    for (uint32_t i = 0; i < dim; ++i) {
      const double difference = std::abs(double{got[row * dim + i]} - want[row * dim + i]);
      const double value = std::abs(double{want[row * dim + i]});
      error = squared ? error + difference * difference : std::max(error, difference);
      size = squared ? size + value * value : std::max(size, value);
    }
    worst = std::max(worst, size == 0 ? error : squared ? std::sqrt(error / size) : error / size);
  }
  return worst;
}

/// Relative error that no row of 64 or more Gaussians passes.
double worst_error(uint32_t bits) {
  constexpr double kErrors[] = {0.4, 0.22, 0.13, 0.08};
  return kErrors[bits - 3];
}

bool all_finite(const std::vector<float>& values) {
  for (const float value : values) {
    if (!std::isfinite(value)) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("exact gives back every bit, whatever head_dims and token count") {
  for (const Backend backend : kBackends) {
    for (const uint32_t dim : {1U, 64U, 80U, 96U, 112U, 128U, 192U, 256U}) {
      for (const uint64_t tokens : {1, 63, 64, 65, 127}) {
        const LayerValues values = random_values({2, dim, dim + 3, 0}, tokens, dim);
        const LayerValues back = round_trip(values, Profile::exact, backend);
        REQUIRE(back.k == values.k);
        REQUIRE(back.v == values.v);
      }
    }
  }
}

TEST_CASE("k8v8 stays within half a step of each row's largest centred value") {
  for (const Backend backend : kBackends) {
    for (const uint32_t dim : {4U, 64U, 80U, 96U, 112U, 128U, 192U, 256U}) {
      for (const uint64_t tokens : {1, 3, 5, 63, 64, 65, 127}) {
        const LayerValues values = random_values({2, dim, dim + 1, 0}, tokens, dim);
        const LayerValues back = round_trip(values, Profile::k8v8, backend);
        // Gaussian rows with offsets of 3: the centred largest is below 6 times the row's own
        // largest.
        CHECK(worst_row_error(back.v, values.v, dim + 1, false) <= 0.51 / 127);
        for (size_t i = 0; i < values.k.size(); ++i) {
          REQUIRE(std::abs(back.k[i] - values.k[i]) <= 0.51 / 127 * 12);
        }
        // The document's first four tokens are exact rows: fp16.
        for (size_t head = 0; head < 2; ++head) {
          for (size_t i = 0; i < std::min<size_t>(4, tokens) * dim; ++i) {
            const float want = values.k[head * tokens * dim + i];
            REQUIRE(std::abs(back.k[head * tokens * dim + i] - want) <= std::abs(want) * 0x1p-11F);
          }
        }
      }
    }
  }
}

TEST_CASE("rotated rows stay within their bits' error at every head_dim and every tail") {
  const auto rule = GENERATE(from_range(std::begin(kProfileRules), std::end(kProfileRules)));
  constexpr uint32_t kDims[] = {64, 80, 96, 112, 128, 192, 256};
  for (const Backend backend : kBackends) {
    for (size_t i = 0; i < std::size(kDims); ++i) {
      const LayerGeometry geometry{2, kDims[i], kDims[std::size(kDims) - 1 - i], 0};
      // The reference is slow, and goes through a row whatever its token.
      const bool every_tail = i == 0 && backend == Backend::cpu;
      for (uint64_t tokens = every_tail ? 1 : 66; tokens <= (every_tail ? 129 : 66); ++tokens) {
        const LayerValues values = random_values(geometry, tokens, kDims[i]);
        const AlignedBytes bytes = encode_one(values, rule.profile, backend);
        const SegmentView view = open_segment(bytes);
        const LayerValues back = decode_all(view, 0, backend);
        // K's error is that of what is left when its mean is taken away.
        LayerValues centred = values;
        LayerValues centred_back = back;
        const uint64_t head_values = tokens * geometry.k_head_dim;
        for (size_t at = 0; at < values.k.size(); ++at) {
          const float mean =
              view.layer(0)
                  .k_means[at / head_values * geometry.k_head_dim + at % geometry.k_head_dim];
          centred.k[at] -= mean;
          centred_back.k[at] -= mean;
        }
        if (rule.k.rotated) {
          REQUIRE(worst_row_error(centred_back.k, centred.k, geometry.k_head_dim, true) <
                  worst_error(rule.k.bits));
        }
        if (rule.v.rotated) {
          REQUIRE(worst_row_error(back.v, values.v, geometry.v_head_dim, true) <
                  worst_error(rule.v.bits));
        }
      }
    }
  }
}

TEST_CASE("rotated rows have a Gaussian's error on average, and are unbiased") {
  // Squared error of Lloyd-Max levels, which an unbiased gain makes larger by that much again.
  const auto expected = [](uint32_t bits) {
    constexpr double kErrors[] = {0.03455, 0.009501, 0.002505, 0.000644};
    return kErrors[bits - 3] / (1 - kErrors[bits - 3]);
  };
  const LayerValues values = random_values({1, 64, 80, 0}, 2000, 15);
  for (const ProfileRule& rule : kProfileRules) {
    if (!rule.v.rotated) continue;
    const LayerValues back = round_trip(values, rule.profile, Backend::cpu);
    double error = 0;
    double energy = 0;
    double worst_bias = 0;
    for (size_t row = 0; row < 2000; ++row) {
      double product = 0;
      double row_energy = 0;
      for (size_t at = row * 80; at < (row + 1) * 80; ++at) {
        error += square(double{back.v[at]} - values.v[at]);
        row_energy += double{values.v[at]} * values.v[at];
        product += double{values.v[at]} * back.v[at];
      }
      energy += row_energy;
      worst_bias = std::max(worst_bias, std::abs(product / row_energy - 1));
    }
    CHECK(error / energy < 1.01 * expected(rule.v.bits));
    CHECK(worst_bias < 0x1p-10);
  }
}

TEST_CASE("paper-k8v3 stays within its method's error at every head_dim that it has") {
  for (const Backend backend : kBackends) {
    for (const uint32_t dim : {8U, 16U, 32U, 64U, 128U, 256U, 512U, 1024U}) {
      for (const uint64_t tokens : {1, 63, 64, 65, 127}) {
        const LayerValues values = random_values({2, dim, dim, 0}, tokens, dim);
        const LayerValues back = round_trip(values, Profile::paper_k8v3, backend);
        float largest = 0;
        for (const float value : values.k) largest = std::max(largest, std::abs(value));
        for (size_t i = 0; i < values.k.size(); ++i) {
          REQUIRE(std::abs(back.k[i] - values.k[i]) <= 0.51 * largest / 127);
        }
        // 3 bits of a Gaussian: 0.18 of the norm on average; short rows vary more.
        CHECK(worst_row_error(back.v, values.v, dim, true) < (dim < 64 ? 0.7 : 0.35));
      }
    }
  }
}

TEST_CASE("4,096 tokens round-trip with K and V of different head_dims") {
  for (const Backend backend : kBackends) {
    const LayerValues values = random_values({1, 64, 32, 0}, 4096, 3);
    CHECK(round_trip(values, Profile::exact, backend).k == values.k);
    CHECK(worst_row_error(round_trip(values, Profile::k8v8, backend).v, values.v, 32, false) <=
          0.51 / 127);
    CHECK(worst_row_error(round_trip(values, Profile::paper_k8v3, backend).v, values.v, 32, true) <
          0.6);
  }
}

TEST_CASE("exact keeps fp16 and bf16 bits, and rounds other dtypes to the nearest even") {
  const LayerGeometry geometry{2, 64, 64, 0};
  const LayerValues values = random_values(geometry, 70, 4);
  for (const Backend backend : kBackends) {
    for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) {
      const AlignedBytes bytes = encode_one(values, Profile::exact, backend, dtype);
      const LayerValues back = decode_all(open_segment(bytes), 0, backend);
      for (size_t i = 0; i < values.k.size(); ++i) {
        const float want = dtype == Dtype::f16 ? f32_from_f16(f16_from_f32(values.k[i]))
                                               : f32_from_bf16(bf16_from_f32(values.k[i]));
        REQUIRE(back.k[i] == want);
      }
    }
  }
}

TEST_CASE("a source of any dtype and strides encodes to the same bytes") {
  const LayerGeometry geometry{3, 64, 32, 0};
  constexpr uint64_t kTokens = 70;
  LayerValues values = random_values(geometry, kTokens, 6);
  // Values that bf16 and fp16 hold exactly.
  for (std::vector<float>* tensor : {&values.k, &values.v}) {
    for (float& value : *tensor) value = std::nearbyint(std::clamp(value, -7.0F, 7.0F) * 16) / 16;
  }
  for (const Profile profile : kAllProfiles) {
    for (const Backend backend : kBackends) {
      SegmentOptions options;
      options.backend = backend;
      const SegmentSpec spec = test_spec(test_model({geometry}), profile, kTokens);
      const AlignedBytes want = build_segment(spec, {values}, options);
      for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
        // K as [token, head, dim]; V transposed, [head, dim, token].
        std::vector<float> k32(values.k.size());
        std::vector<float> v32(values.v.size());
        std::vector<uint16_t> k16(values.k.size());
        std::vector<uint16_t> v16(values.v.size());
        const auto put = [&](float value, std::vector<float>& f32, std::vector<uint16_t>& f16,
                             size_t at) {
          f32[at] = value;
          f16[at] = dtype == Dtype::f16 ? f16_from_f32(value) : bf16_from_f32(value);
        };
        for (size_t h = 0; h < 3; ++h) {
          for (size_t t = 0; t < kTokens; ++t) {
            for (size_t d = 0; d < 64; ++d)
              put(values.k[(h * kTokens + t) * 64 + d], k32, k16, (t * 3 + h) * 64 + d);
            for (size_t d = 0; d < 32; ++d)
              put(values.v[(h * kTokens + t) * 32 + d], v32, v16, (h * 32 + d) * kTokens + t);
          }
        }
        KvSource source;
        source.dtype = dtype;
        source.k = dtype == Dtype::f32 ? static_cast<const void*>(k32.data()) : k16.data();
        source.v = dtype == Dtype::f32 ? static_cast<const void*>(v32.data()) : v16.data();
        source.k_strides = {64, 3 * 64, 1};
        source.v_strides = {32 * kTokens, 1, kTokens};
        AlignedBytes bytes(*segment_size_bytes(spec));
        const std::vector<uint32_t> ids = test_ids(kTokens);
        std::vector<Digest> digests(spec.digest_count);
        digests[0].fill(1);
        Result<SegmentWriter> writer = SegmentWriter::create(
            spec, {ids, chain_root(spec.identity), digests, {}}, bytes.span());
        REQUIRE_OK(writer);
        REQUIRE_OK(writer->encode_layer(0, source, {}, backend));
        REQUIRE_OK(writer->finish());
        REQUIRE(std::equal(bytes.span().begin(), bytes.span().end(), want.span().begin()));
      }
    }
  }
}

TEST_CASE("any token range decodes into any strides and dtype, and nothing else is written") {
  const LayerGeometry geometry{2, 32, 64, 0};
  constexpr uint64_t kTokens = 200;
  const LayerValues values = random_values(geometry, kTokens, 7);
  struct Range {
    uint64_t first, count;
  };
  for (const Profile profile : kAllProfiles) {
    const AlignedBytes bytes = encode_one(values, profile, Backend::reference);
    const SegmentView view = open_segment(bytes);
    for (const Backend backend : kBackends) {
      const LayerValues all = decode_all(view, 0, backend);
      for (const Range range :
           {Range{0, 1}, {0, 200}, {3, 60}, {3, 62}, {64, 64}, {60, 140}, {199, 1}}) {
        for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
          for (const bool transposed : {false, true}) {
            // Room for a guard element at either end, and between rows when not transposed.
            const auto count = static_cast<int64_t>(range.count);
            const Strides k_strides =
                transposed ? Strides{32 * count, 1, count} : Strides{33, 2 * 33, 1};
            const Strides v_strides =
                transposed ? Strides{64 * count, 1, count} : Strides{count * 65, 65, 1};
            std::vector<float> k32(2 * 33 * range.count + 2, -99.0F);
            std::vector<float> v32(2 * 65 * range.count + 2, -99.0F);
            std::vector<uint16_t> k16(k32.size(), 0xeeee);
            std::vector<uint16_t> v16(v32.size(), 0xeeee);
            DecodeTarget target;
            target.first_token = range.first;
            target.token_count = range.count;
            target.dtype = dtype;
            target.k = dtype == Dtype::f32 ? static_cast<void*>(k32.data() + 1) : k16.data() + 1;
            target.v = dtype == Dtype::f32 ? static_cast<void*>(v32.data() + 1) : v16.data() + 1;
            target.k_strides = k_strides;
            target.v_strides = v_strides;
            REQUIRE_OK(decode_layer(view, 0, target, backend));
            uint64_t wrong = 0;
            const auto check = [&](std::vector<float>& f32, std::vector<uint16_t>& f16,
                                   const Strides& s, const std::vector<float>& want,
                                   uint32_t dims) {
              for (uint64_t h = 0; h < 2; ++h) {
                for (uint64_t t = 0; t < range.count; ++t) {
                  for (uint32_t d = 0; d < dims; ++d) {
                    const auto at =
                        static_cast<size_t>(1 + s.head * static_cast<int64_t>(h) +
                                            s.token * static_cast<int64_t>(t) + s.dim * d);
                    const float value = want[(h * kTokens + range.first + t) * dims + d];
                    if (dtype == Dtype::f32) {
                      wrong += f32[at] != value ? 1U : 0U;
                      f32[at] = -99.0F;
                    } else {
                      const uint16_t half =
                          dtype == Dtype::f16 ? f16_from_f32(value) : bf16_from_f32(value);
                      wrong += f16[at] != half ? 1U : 0U;
                      f16[at] = 0xeeee;
                    }
                  }
                }
              }
              // Whatever was not addressed is as it was.
              for (const float value : f32) wrong += value != -99.0F ? 1U : 0U;
              for (const uint16_t half : f16) wrong += half != 0xeeee ? 1U : 0U;
            };
            check(k32, k16, k_strides, all.k, 32);
            check(v32, v16, v_strides, all.v, 64);
            REQUIRE(wrong == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("K alone and V alone decode") {
  const LayerValues values = random_values({1, 64, 64, 0}, 70, 8);
  for (const Profile profile : kAllProfiles) {
    const AlignedBytes bytes = encode_one(values, profile, Backend::cpu);
    const SegmentView view = open_segment(bytes);
    for (const Backend backend : kBackends) {
      const LayerValues all = decode_all(view, 0, backend);
      std::vector<float> out(values.k.size());
      DecodeTarget target;
      target.token_count = 70;
      target.k = out.data();
      target.k_strides = {0, 64, 1};
      REQUIRE_OK(decode_layer(view, 0, target, backend));
      CHECK(out == all.k);
      target.v = target.k;
      target.v_strides = target.k_strides;
      target.k = nullptr;
      REQUIRE_OK(decode_layer(view, 0, target, backend));
      CHECK(out == all.v);
    }
  }
}

TEST_CASE("zeros decode to zeros, and huge, tiny and mixed magnitudes stay finite and close") {
  const LayerGeometry geometry{2, 64, 64, 0};
  for (const Backend backend : kBackends) {
    const LayerValues zeros = empty_values(geometry, 70);
    for (const Profile profile : kAllProfiles) {
      const LayerValues back = round_trip(zeros, profile, backend);
      CHECK(back.k == zeros.k);
      CHECK(back.v == zeros.v);
    }
    for (const float scale : {1e30F, 1e-30F, 1e-40F, 0x1p-149F, 5e34F}) {
      LayerValues values = random_values(geometry, 70, 9);
      for (float& value : values.k) value *= scale;
      for (float& value : values.v) value *= scale;
      CHECK(round_trip(values, Profile::exact, backend).k == values.k);
      const LayerValues k8v8 = round_trip(values, Profile::k8v8, backend);
      CHECK(all_finite(k8v8.k));
      CHECK(all_finite(k8v8.v));
      const LayerValues paper = round_trip(values, Profile::paper_k8v3, backend);
      CHECK(all_finite(paper.k));
      CHECK(all_finite(paper.v));
      for (const ProfileRule& rule : kProfileRules) {
        const LayerValues back = round_trip(values, rule.profile, backend);
        CHECK(all_finite(back.k));
        CHECK(all_finite(back.v));
        // Rows beneath 2^-126 are denormal, and so are their gains.
        if (scale >= 1e-30F && rule.v.rotated) {
          CHECK(worst_row_error(back.v, values.v, 64, true) < worst_error(rule.v.bits));
        }
      }
      if (scale >= 1e-30F) CHECK(worst_row_error(k8v8.v, values.v, 64, false) <= 0.51 / 127);
      if (scale >= 1e30F) CHECK(worst_row_error(paper.v, values.v, 64, true) < 0.35);
    }
    // One row 1e30, its neighbours 1: no row loses its own precision in k8v8 but those beneath
    // 2^-38 of the largest.
    LayerValues mixed = random_values(geometry, 70, 10);
    for (size_t i = 0; i < 64; ++i) mixed.v[20 * 64 + i] *= 1e6F;
    CHECK(worst_row_error(round_trip(mixed, Profile::k8v8, backend).v, mixed.v, 64, false) <=
          0.51 / 127);
    CHECK(worst_row_error(round_trip(mixed, Profile::k5v4, backend).v, mixed.v, 64, true) <
          worst_error(4));
    for (size_t i = 0; i < 64; ++i) {
      mixed.v[20 * 64 + i] *= 1e24F;
      mixed.k[20 * 64 + i] *= 1e30F;
    }
    for (const ProfileRule& rule : kProfileRules) {
      const LayerValues back = round_trip(mixed, rule.profile, backend);
      CHECK(all_finite(back.k));
      CHECK(all_finite(back.v));
    }
  }
}

TEST_CASE(
    "NaN, infinities and values beyond a codec are refused, naming layer, token, kv_head, and K or "
    "V") {
  const LayerGeometry geometry{2, 64, 64, 0};
  struct Bad {
    float value;
    bool exact_too;
  };
  for (const Backend backend : kBackends) {
    for (const Profile profile : kAllProfiles) {
      for (const Bad bad : {Bad{std::nanf(""), true},
                            {std::numeric_limits<float>::infinity(), true},
                            {-std::numeric_limits<float>::infinity(), true},
                            {3e38F, false}}) {
        for (const bool in_k : {true, false}) {
          LayerValues values = random_values(geometry, 80, 11);
          (in_k ? values.k : values.v)[(80 + 77) * 64 + 63] = bad.value;
          SegmentOptions options;
          options.backend = backend;
          const SegmentSpec spec = test_spec(test_model({geometry, geometry}), profile, 80);
          const Result<AlignedBytes> result =
              try_build_segment(spec, {random_values(geometry, 80, 12), values}, options);
          if (profile == Profile::exact && !bad.exact_too) {
            CHECK_OK(result);
            continue;
          }
          REQUIRE(!result.is_ok());
          CHECK(result.status().code() == POLYKV_ERR_INVALID_ARGUMENT);
          const std::string where =
              in_k ? "layer 1: K of token 77, kv_head 1" : "layer 1: V of token 77, kv_head 1";
          CHECK(result.status().message().find(where) != std::string::npos);
        }
      }
    }
    // exact in fp16 cannot hold 1e30.
    LayerValues values = random_values(geometry, 10, 13);
    values.v[5] = 1e30F;
    SegmentOptions options;
    options.backend = backend;
    const Result<AlignedBytes> result = try_build_segment(
        test_spec(test_model({geometry}, Dtype::f16), Profile::exact, 10), {values}, options);
    REQUIRE(!result.is_ok());
    CHECK(result.status().message().find("V of token 0, kv_head 0") != std::string::npos);
  }
}

TEST_CASE("chosen exact rows are kept in fp16 wherever they are") {
  const LayerGeometry geometry{2, 64, 64, 0};
  LayerValues values = random_values(geometry, 150, 14);
  for (size_t i = 0; i < 64; ++i) values.k[100 * 64 + i] *= 1e5F;  // beyond fp16 itself
  const auto rule = GENERATE(from_range(std::begin(kProfileRules), std::end(kProfileRules)));
  for (const Backend backend : kBackends) {
    SegmentOptions options;
    options.backend = backend;
    options.chosen_exact_rows = 2;
    options.chosen = {63, 100};
    const AlignedBytes bytes = build_segment(
        test_spec(test_model({geometry}), rule.profile, 150, options), {values}, options);
    const LayerValues back = decode_all(open_segment(bytes), 0, backend);
    for (const size_t token : {size_t{0}, size_t{3}, size_t{63}, size_t{100}}) {
      for (size_t head = 0; head < 2; ++head) {
        for (size_t i = 0; i < 64; ++i) {
          const size_t at = (head * 150 + token) * 64 + i;
          REQUIRE(std::abs(back.k[at] - values.k[at]) <= std::abs(values.k[at]) * 0x1p-11F);
          REQUIRE(std::abs(back.v[at] - values.v[at]) <= std::abs(values.v[at]) * 0x1p-11F);
        }
      }
    }
    // The outlier is an exact row and so touches no other row's mean or gain.
    CHECK(std::abs(back.k[101 * 64] - values.k[101 * 64]) <=
          (rule.k.rotated ? 1.0 : 0.51 / 127 * 12));
  }
}
