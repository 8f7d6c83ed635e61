// paper-k8v3 against inputs, codes and outputs of the published implementation
// (tests/data/README.md).
#include <catch2/catch.hpp>
#include <cmath>

#include "kernels/block_layout.h"
#include "kernels/codec_rules.h"
#include "tests/support/npy.h"
#include "tests/support/relative_error.h"
#include "tests/support/require_ok.h"
#include "tests/support/segments.h"

using namespace polykv;
using namespace polykv::test;

namespace {

template <typename T>
std::vector<T> load(const std::string& folder, int layer, const char* what,
                    const char* descriptor) {
  const std::string path = std::string(POLYKV_TEST_DATA_DIR) + "/paper_k8v3/" + folder + "/layer" +
                           std::to_string(layer) + "_" + what + ".npy";
  return load_npy<T>(path, descriptor).values;
}

/// V of a row, normalised and rotated as the codec does: what its indices are the nearest codebook
/// entries of.
std::vector<double> rotated(const float* row, uint32_t dim) {
  double squares = 0;
  for (uint32_t i = 0; i < dim; ++i) squares += double{row[i]} * row[i];
  std::vector<double> out(dim, 0.0);
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      const double sign = __builtin_popcount(i & j) % 2 == 0 ? 1 : -1;
      out[i] += sign * row[j] / std::max(std::sqrt(squares), 1e-8);
    }
  }
  return out;
}

double boundary_distance(double value) {
  double nearest = 1e9;
  for (size_t i = 1; i < kPaperCodebook.size(); ++i) {
    nearest = std::min(nearest,
                       std::abs(value - (double{kPaperCodebook[i - 1]} + kPaperCodebook[i]) / 2));
  }
  return nearest;
}

void check_folder(const std::string& folder, uint32_t heads, uint32_t dim, Backend backend) {
  constexpr uint64_t kTokens = 130;
  const LayerGeometry geometry{heads, dim, dim, 0};
  std::vector<LayerValues> layers;
  for (int layer = 0; layer < 2; ++layer) {
    layers.push_back({geometry, kTokens, load<float>(folder, layer, "k", "<f4"),
                      load<float>(folder, layer, "v", "<f4")});
  }
  SegmentOptions options;
  options.backend = backend;
  const AlignedBytes bytes = build_segment(
      test_spec(test_model({geometry, geometry}), Profile::paper_k8v3, kTokens), layers, options);
  const SegmentView view = open_segment(bytes);
  CHECK_OK(view.verify_checksums());
  for (int layer = 0; layer < 2; ++layer) {
    const LayerView parts = view.layer(static_cast<uint32_t>(layer));
    const auto k_codes = load<int8_t>(folder, layer, "k_codes", "|i1");
    const auto v_index = load<int8_t>(folder, layer, "v_index", "|i1");
    const auto k_out = load<float>(folder, layer, "k_out", "<f4");
    const auto v_out = load<float>(folder, layer, "v_out", "<f4");
    const float scale = load<float>(folder, layer, "k_scale", "<f4")[0];
    CHECK(parts.scales.k_scale == scale);
    const std::vector<float>& k = layers[static_cast<size_t>(layer)].k;
    const std::vector<float>& v = layers[static_cast<size_t>(layer)].v;
    uint64_t wrong_k = 0;
    uint64_t wrong_v = 0;
    uint64_t excused = 0;
    for (uint32_t row = 0; row < heads * kTokens; ++row) {
      const uint8_t* block = parts.block(row / kTokens, row % kTokens / kBlockTokens);
      const auto slot = static_cast<uint32_t>(row % kTokens % kBlockTokens);
      const std::vector<double> y = rotated(&v[size_t{row} * dim], dim);
      for (uint32_t i = 0; i < dim; ++i) {
        const size_t at = size_t{row} * dim + i;
        if (block[PaperBlock::k_codes + k8_offset(slot, i)] - kKeyBias != k_codes[at]) {
          const double x = double{k[at]} / scale;
          std::abs(std::abs(x - std::floor(x)) - 0.5) <= 1e-5 ? ++excused : ++wrong_k;
        }
        if (v3_get(block + PaperBlock::v_codes(geometry), slot, i, dim) !=
            static_cast<uint32_t>(v_index[at])) {
          boundary_distance(y[i]) <= 1e-5 ? ++excused : ++wrong_v;
        }
      }
    }
    CHECK(wrong_k == 0);
    CHECK(wrong_v == 0);
    CHECK(excused <= 4);

    const LayerValues decoded = decode_all(view, static_cast<uint32_t>(layer), backend);
    double largest_v = 0;
    for (const float value : v) largest_v = std::max<double>(largest_v, std::abs(value));
    double worst_k = 0;
    uint64_t bad_rows = 0;
    for (uint32_t row = 0; row < heads * kTokens; ++row) {
      double difference = 0;
      double norm = 0;
      for (uint32_t i = 0; i < dim; ++i) {
        const size_t at = size_t{row} * dim + i;
        worst_k = std::max<double>(worst_k, std::abs(decoded.k[at] - k_out[at]));
        difference += square(double{decoded.v[at]} - v_out[at]);
        norm += square(double{v_out[at]});
      }
      if (std::sqrt(difference) > std::max(6e-4 * std::sqrt(norm), 1e-7 * largest_v)) ++bad_rows;
    }
    CHECK(worst_k <= 1e-6 * scale * 127);
    CHECK(bad_rows == 0);
  }
}

}  // namespace

TEST_CASE("paper-k8v3 gives the published codes and outputs at head_dim 64") {
  check_folder("d64", 3, 64, Backend::reference);
  check_folder("d64", 3, 64, Backend::cpu);
}

TEST_CASE("paper-k8v3 gives the published codes and outputs at head_dim 128") {
  check_folder("d128", 2, 128, Backend::reference);
  check_folder("d128", 2, 128, Backend::cpu);
}
