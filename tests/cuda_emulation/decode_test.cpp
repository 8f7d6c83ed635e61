// Decoding kernels against the reference: every profile, head_dim and tail, under several schedules
// of threads.
#include <catch2/catch.hpp>

#include "kernels/half.h"
#include "tests/cuda_emulation/device_calls.h"
#include "tests/support/compare_paths.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr uint32_t kDims[] = {64, 80, 96, 112, 128, 192, 256};
constexpr Schedule kSchedules[] = {{Order::ascending}, {Order::descending}, {Order::random, 11}};

bool holds(Profile profile, const LayerGeometry& geometry) {
  return codec_for(profile)->check_geometry(profile, geometry).is_ok();
}

/// With two chosen exact rows beyond the first four, where there are as many tokens.
AlignedBytes encode(const LayerValues& values, Profile profile, Dtype source_dtype = Dtype::f32) {
  SegmentOptions options;
  if (codec_for(profile)->has_exact_rows && values.token_count > 20) {
    options.chosen_exact_rows = 2;
    options.chosen = {17, static_cast<uint32_t>(values.token_count - 1)};
  }
  return build_segment(
      test_spec(test_model({values.geometry}, source_dtype), profile, values.token_count, options),
      {values}, options);
}

LayerValues decode_on_device(const LayerView& layer, const Schedule& schedule) {
  LayerValues values = empty_values(layer.geometry, layer.token_count);
  std::fill(values.k.begin(), values.k.end(), -99.0F);
  std::fill(values.v.begin(), values.v.end(), -99.0F);
  const KvSource where = values.source();
  DecodeTarget target;
  target.token_count = layer.token_count;
  target.k = values.k.data();
  target.k_strides = where.k_strides;
  target.v = values.v.data();
  target.v_strides = where.v_strides;
  const Status status = device_decode(layer, target, schedule);
  INFO(status.message());
  REQUIRE_OK(status);
  return values;
}

}  // namespace

TEST_CASE("every profile, head_dim and tail decodes as the reference does") {
  uint32_t cases = 0;
  for (const Profile profile : kAllProfiles) {
    for (size_t i = 0; i < std::size(kDims); ++i) {
      for (const uint64_t tokens : {1, 63, 64, 65}) {
        if (++cases % POLYKV_CASE_STEP != 0) continue;
        // K and V of different head_dims; a paper's V is a power of two.
        uint32_t v_dim = kDims[(i * 3 + 2) % std::size(kDims)];
        if (profile == Profile::paper_k8v3) v_dim = i % 2 == 0 ? 64 : 256;
        const LayerGeometry geometry{2, kDims[i], v_dim, 0};
        INFO(profile_name(profile) << " " << kDims[i] << " " << v_dim << " " << tokens);
        REQUIRE(holds(profile, geometry));
        const AlignedBytes bytes = encode(random_values(geometry, tokens, kDims[i]), profile);
        const SegmentView view = open_segment(bytes);
        const LayerValues want = decode_all(view, 0, Backend::reference);
        for (const Schedule& schedule : kSchedules) {
          const LayerValues got = decode_on_device(view.layer(0), schedule);
          if (profile == Profile::exact) {
            REQUIRE(got.k == want.k);
            REQUIRE(got.v == want.v);
          }
          REQUIRE(relative_error(got.k, want.k) <= 1e-6);
          REQUIRE(relative_error(got.v, want.v) <= 1e-6);
        }
      }
    }
  }
  CHECK(cases == 7 * 7 * 4);
}

TEST_CASE("K and V of any head_dim that a profile holds decode as the reference does") {
  for (const Profile profile : kAllProfiles) {
    for (const uint32_t dim : {16U, 20U, 33U, 48U, 160U, 208U, 240U, 252U, 255U}) {
      for (const LayerGeometry& geometry :
           {LayerGeometry{1, dim, 64, 0}, LayerGeometry{1, 64, dim, 0}}) {
        if (!holds(profile, geometry)) continue;
        INFO(profile_name(profile) << " " << geometry.k_head_dim << " " << geometry.v_head_dim);
        const AlignedBytes bytes = encode(random_values(geometry, 70, dim), profile);
        const SegmentView view = open_segment(bytes);
        const LayerValues want = decode_all(view, 0, Backend::reference);
        const LayerValues got = decode_on_device(view.layer(0), kSchedules[dim % 3]);
        REQUIRE(relative_error(got.k, want.k) <= 1e-6);
        REQUIRE(relative_error(got.v, want.v) <= 1e-6);
      }
    }
  }
}

TEST_CASE(
    "the device decodes any token range into any strides and dtype, and writes nothing else") {
  struct Range {
    uint64_t first, count;
  };
  const LayerGeometry geometry{2, 32, 64, 0};
  constexpr uint64_t kTokens = 200;
  uint32_t cases = 0;
  for (const Profile profile : kAllProfiles) {
    const AlignedBytes bytes = encode(random_values(geometry, kTokens, 7), profile, Dtype::bf16);
    const LayerView layer = open_segment(bytes).layer(0);
    const LayerValues all = decode_on_device(layer, kSchedules[0]);
    for (const Range range : {Range{0, 1}, {0, 200}, {3, 60}, {64, 64}, {60, 140}, {199, 1}}) {
      for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
        const bool transposed = cases % 2 == 0;
        INFO(profile_name(profile) << " " << range.first << " " << range.count << " "
                                   << dtype_name(dtype) << " " << transposed);
        const auto count = static_cast<int64_t>(range.count);
        const Strides k_strides =
            transposed ? Strides{32 * count, 1, count} : Strides{33, 2 * 33, 1};
        const Strides v_strides =
            transposed ? Strides{64 * count, 1, count} : Strides{count * 65, 65, 1};
        std::vector<float> k32(2 * 33 * range.count + 2, -99.0F);
        std::vector<float> v32(2 * 65 * range.count + 2, -99.0F);
        std::vector<uint16_t> k16(k32.size(), 0xeeee);
        std::vector<uint16_t> v16(v32.size(), 0xeeee);
        DecodeTarget target{range.first, range.count, dtype,    nullptr,
                            k_strides,   nullptr,     v_strides};
        target.k = dtype == Dtype::f32 ? static_cast<void*>(k32.data() + 1) : k16.data() + 1;
        target.v = dtype == Dtype::f32 ? static_cast<void*>(v32.data() + 1) : v16.data() + 1;
        REQUIRE_OK(device_decode(layer, target, kSchedules[cases++ % 3]));
        uint64_t wrong = 0;
        const auto check = [&](std::vector<float>& f32, std::vector<uint16_t>& f16,
                               const Strides& s, const std::vector<float>& want, uint32_t dims) {
          for (uint64_t h = 0; h < 2; ++h) {
            for (uint64_t t = 0; t < range.count; ++t) {
              for (uint32_t d = 0; d < dims; ++d) {
                const auto at = static_cast<size_t>(1 + s.head * static_cast<int64_t>(h) +
                                                    s.token * static_cast<int64_t>(t) + s.dim * d);
                const float value = want[(h * kTokens + range.first + t) * dims + d];
                if (dtype == Dtype::f32) {
                  wrong += f32[at] != value ? 1U : 0U;
                  f32[at] = -99.0F;
                } else {
                  wrong +=
                      f16[at] != (dtype == Dtype::f16 ? f16_from_f32(value) : bf16_from_f32(value));
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

TEST_CASE("a null K or V is left out, and no tokens are no work") {
  const AlignedBytes bytes = encode(random_values({1, 64, 64, 0}, 70, 1), Profile::k5v4);
  const LayerView layer = open_segment(bytes).layer(0);
  std::vector<float> values(70 * 64, -99.0F);
  DecodeTarget target{0, 70, Dtype::f32, nullptr, {}, values.data(), {0, 64, 1}};
  CHECK_OK(device_decode(layer, target, kSchedules[0]));
  CHECK(std::count(values.begin(), values.end(), -99.0F) == 0);
  std::fill(values.begin(), values.end(), -99.0F);
  target.token_count = 0;
  CHECK_OK(device_decode(layer, target, kSchedules[0]));
  target = {0, 70, Dtype::f32, nullptr, {}, nullptr, {}};
  CHECK_OK(device_decode(layer, target, kSchedules[0]));
  CHECK(std::count(values.begin(), values.end(), -99.0F) == 70 * 64);
}

TEST_CASE("decoding on the device refuses what it cannot do, and says why") {
  const AlignedBytes bytes = encode(random_values({1, 64, 272, 0}, 70, 1), Profile::k5v4);
  const LayerView wide = open_segment(bytes).layer(0);
  std::vector<float> values(70 * 272, -99.0F);
  DecodeTarget target{0, 70, Dtype::f32, nullptr, {}, values.data(), {0, 272, 1}};
  const Status too_wide = device_decode(wide, target, kSchedules[0]);
  CHECK(too_wide.code() == POLYKV_ERR_UNSUPPORTED);
  CHECK(too_wide.message().find("272") != std::string::npos);
  LayerView layer = wide;
  layer.geometry.v_head_dim = 256;
  target.first_token = 1;
  const Status outside = device_decode(layer, target, kSchedules[0]);
  CHECK(outside.code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(outside.message().find("1 + 70") != std::string::npos);
  target.first_token = 0;
  target.dtype = static_cast<Dtype>(9);
  CHECK(device_decode(layer, target, kSchedules[0]).code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(std::count(values.begin(), values.end(), -99.0F) == 70 * 272);
}
