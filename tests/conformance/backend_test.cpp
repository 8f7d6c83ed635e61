// The fast paths against the reference: the tolerances of docs/segment-format.md.
#include <catch2/catch.hpp>
#include <cstring>
#include <random>

#include "kernels/block_layout.h"
#include "kernels/codec_rules.h"
#include "kernels/cpu/ops.h"
#include "tests/support/compare_paths.h"
#include "tests/support/guarded_bytes.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

AlignedBytes encode(const LayerValues& values, Profile profile, Backend backend) {
  SegmentOptions options;
  options.backend = backend;
  return build_segment(test_spec(test_model({values.geometry}), profile, values.token_count),
                       {values}, options);
}

const LayerGeometry kGeometries[] = {{3, 64, 64, 0}, {1, 128, 64, 0}, {2, 256, 32, 0}};

}  // namespace

TEST_CASE("exact is the same bytes on every path") {
  for (const LayerGeometry& geometry : kGeometries) {
    const LayerValues values = random_values(geometry, 333, 1);
    const AlignedBytes a = encode(values, Profile::exact, Backend::reference);
    const AlignedBytes b = encode(values, Profile::exact, Backend::cpu);
    CHECK(std::equal(a.span().begin(), a.span().end(), b.span().begin(), b.span().end()));
  }
}

TEST_CASE(
    "quantised: means equal, gains within an fp16 ulp, codes within a step in at most 1e-4 of the "
    "values, but for rows of which two scales are equally good") {
  const auto rule = GENERATE(from_range(std::begin(kProfileRules), std::end(kProfileRules)));
  INFO(profile_name(rule.profile));
  for (const LayerGeometry& geometry :
       {LayerGeometry{3, 64, 64, 0}, {1, 128, 80, 0}, {2, 112, 192, 0}, {1, 96, 256, 0}}) {
    const LayerValues values = random_values(geometry, 777, 2);
    const AlignedBytes a = encode(values, rule.profile, Backend::reference);
    const AlignedBytes b = encode(values, rule.profile, Backend::cpu);
    const LayerView want = open_segment(a).layer(0);
    const LayerView got = open_segment(b).layer(0);
    CHECK(std::memcmp(want.k_means, got.k_means,
                      geometry.kv_head_count * geometry.k_head_dim * 4) == 0);
    CHECK(want.scales.k_gain_exponent == got.scales.k_gain_exponent);
    CHECK(want.scales.v_gain_exponent == got.scales.v_gain_exponent);
    for (const TensorPart& part : {k_part(rule, geometry), v_part(rule, geometry)}) {
      const Differences found = compare(values, want, got, part);
      CHECK(found.far == 0);
      CHECK(found.excused_rows <= 777 * geometry.kv_head_count / 100);
      CHECK(static_cast<double>(found.codes) <=
            1e-4 * 777 * geometry.kv_head_count * part.head_dim);
    }
  }
}

TEST_CASE(
    "paper-k8v3: scale equal, norms within an fp16 ulp, codes within a step in at most 1e-4 of the "
    "values") {
  for (const LayerGeometry& geometry : kGeometries) {
    const LayerValues values = random_values(geometry, 777, 3);
    const AlignedBytes a = encode(values, Profile::paper_k8v3, Backend::reference);
    const AlignedBytes b = encode(values, Profile::paper_k8v3, Backend::cpu);
    const LayerView want = open_segment(a).layer(0);
    const LayerView got = open_segment(b).layer(0);
    CHECK(want.scales.k_scale == got.scales.k_scale);
    CHECK(want.scales.v_gain_exponent == got.scales.v_gain_exponent);
    uint64_t different = 0;
    uint64_t far = 0;
    for (uint32_t head = 0; head < geometry.kv_head_count; ++head) {
      for (uint64_t token = 0; token < 777; ++token) {
        if (std::abs(gain_at(want, head, token, 0) - gain_at(got, head, token, 0)) > 1) ++far;
        const uint8_t* x = want.block(head, token / 64);
        const uint8_t* y = got.block(head, token / 64);
        const auto slot = static_cast<uint32_t>(token % 64);
        for (uint32_t i = 0; i < geometry.k_head_dim; ++i) {
          const int step = x[PaperBlock::k_codes + k8_offset(slot, i)] -
                           y[PaperBlock::k_codes + k8_offset(slot, i)];
          if (step != 0) ++different;
          if (std::abs(step) > 1) ++far;
        }
        for (uint32_t i = 0; i < geometry.v_head_dim; ++i) {
          const uint64_t start = PaperBlock::v_codes(geometry);
          const int step = static_cast<int>(v3_get(x + start, slot, i, geometry.v_head_dim)) -
                           static_cast<int>(v3_get(y + start, slot, i, geometry.v_head_dim));
          if (step != 0) ++different;
          if (std::abs(step) > 1) ++far;
        }
      }
    }
    CHECK(far == 0);
    CHECK(static_cast<double>(different) <=
          1e-4 * static_cast<double>(values.k.size() + values.v.size()));
  }
}

TEST_CASE("every path decodes the same bytes to values within 1e-6 of the reference") {
  for (const Profile profile : kAllProfiles) {
    for (const LayerGeometry& geometry : kGeometries) {
      const LayerValues values = random_values(geometry, 333, 4);
      const AlignedBytes bytes = encode(values, profile, Backend::reference);
      const SegmentView view = open_segment(bytes);
      const LayerValues want = decode_all(view, 0, Backend::reference);
      const LayerValues got = decode_all(view, 0, Backend::cpu);
      CHECK(relative_error(got.k, want.k) <= 1e-6);
      CHECK(relative_error(got.v, want.v) <= 1e-6);
    }
  }
}

/// Gaussian values times `scale`.
static LayerValues values_of_size(float scale) {
  LayerValues values = random_values({2, 128, 80, 0}, 70, 5);
  for (float& value : values.k) value *= scale;
  for (float& value : values.v) value *= scale;
  return values;
}

TEST_CASE("values near the ends of fp32's range decode as the reference decodes them") {
  for (const ProfileRule& rule : kProfileRules) {
    for (const float scale : {0x1p-108F, 0x1p-90F, 0x1p-60F, 0x1p100F}) {
      INFO(profile_name(rule.profile) << ", values of " << scale);
      const LayerValues values = values_of_size(scale);
      const AlignedBytes bytes = encode(values, rule.profile, Backend::reference);
      const SegmentView view = open_segment(bytes);
      const LayerValues want = decode_all(view, 0, Backend::reference);
      const LayerValues got = decode_all(view, 0, Backend::cpu);
      CHECK(relative_error(got.k, want.k) <= 1e-6);
      CHECK(relative_error(got.v, want.v) <= 1e-6);
    }
  }
}

TEST_CASE("denormal values decode to the reference's, within two steps of fp32") {
  for (const ProfileRule& rule : kProfileRules) {
    for (const float scale : {0x1p-140F, 0x1p-135F, 0x1p-128F}) {
      INFO(profile_name(rule.profile) << ", values of " << scale);
      const LayerValues values = values_of_size(scale);
      const AlignedBytes bytes = encode(values, rule.profile, Backend::reference);
      const SegmentView view = open_segment(bytes);
      const LayerValues want = decode_all(view, 0, Backend::reference);
      const LayerValues got = decode_all(view, 0, Backend::cpu);
      uint64_t far = 0;
      const auto compare = [&](const std::vector<float>& a, const std::vector<float>& b) {
        for (size_t i = 0; i < b.size(); ++i) {
          if (!(std::abs(double{a[i]} - b[i]) <= 2 * 0x1p-149)) ++far;
        }
      };
      compare(got.k, want.k);
      compare(got.v, want.v);
      CHECK(far == 0);
    }
  }
}

TEST_CASE("values near the ends of fp32's range are coded as by the reference, denormals too") {
  for (const ProfileRule& rule : kProfileRules) {
    for (const float scale : {0x1p-135F, 0x1p-128F, 0x1p-108F, 0x1p-60F, 0x1p100F, 0x1p116F}) {
      INFO(profile_name(rule.profile) << ", values of " << scale);
      const LayerValues values = values_of_size(scale);
      const AlignedBytes bytes = encode(values, rule.profile, Backend::reference);
      const AlignedBytes fast = encode(values, rule.profile, Backend::cpu);
      for (const TensorPart& part :
           {k_part(rule, values.geometry), v_part(rule, values.geometry)}) {
        const Differences found =
            compare(values, open_segment(bytes).layer(0), open_segment(fast).layer(0), part);
        CHECK(found.far == 0);
        CHECK(found.codes <= 2);
      }
    }
  }
}

TEST_CASE("encoding twice gives the same bytes") {
  const LayerValues values = random_values(kGeometries[0], 333, 5);
  for (const Profile profile : kAllProfiles) {
    for (const Backend backend : {Backend::reference, Backend::cpu}) {
      const AlignedBytes a = encode(values, profile, backend);
      const AlignedBytes b = encode(values, profile, backend);
      CHECK(std::equal(a.span().begin(), a.span().end(), b.span().begin()));
    }
  }
}

TEST_CASE("the tail of a block holds zeros behind the last token") {
  const LayerValues values = random_values({1, 64, 64, 0}, 65, 6);
  for (const Backend backend : {Backend::reference, Backend::cpu}) {
    for (const Profile profile : kAllProfiles) {
      const AlignedBytes bytes = encode(values, profile, backend);
      const LayerView layer = open_segment(bytes).layer(0);
      const uint8_t* block = layer.block(0, 1);
      uint64_t used = 0;
      for (uint64_t i = 0; i < layer.block_bytes; ++i) used += block[i] != 0 ? 1U : 0U;
      // One token's codes, its gains; at 3 bits a code lies in up to three bytes.
      CHECK(used <= (profile == Profile::exact ? 512U : 64 + 3 * 64 + 4));
      CHECK(used > 0);
    }
  }
}

TEST_CASE(
    "every head_dim, dtype and layout decodes as the reference does, whole lines at once or not") {
  const auto rule = GENERATE(from_range(std::begin(kProfileRules), std::end(kProfileRules)));
  INFO(profile_name(rule.profile));
  // Transforms of all sizes, also of those that 16 bits do not hold.
  for (const uint32_t dim : {16U, 80U, 256U, 1008U, 1024U}) {
    // The large ones are slow: one profile that rotates and one that does not.
    if (dim > 256 && rule.profile != Profile::k5v4 && rule.profile != Profile::k8v8) continue;
    // Enough tokens for targets that are written past the caches, at the largest.
    const uint64_t token_count = dim == 1024 ? 560 : 130;
    const LayerGeometry geometry{1, dim, dim, 0};
    const AlignedBytes bytes =
        encode(random_values(geometry, token_count, 9), rule.profile, Backend::cpu);
    const LayerValues want = decode_all(open_segment(bytes), 0, Backend::reference);
    const LayerValues got = decode_all(open_segment(bytes), 0, Backend::cpu);
    INFO(dim);
    CHECK(relative_error(got.k, want.k) <= 1e-6);
    CHECK(relative_error(got.v, want.v) <= 1e-6);
    for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) {
      // Another first token than a block's, and rows with something between them.
      const uint64_t first = 3;
      const uint64_t count = token_count - 5;
      for (const int64_t stride : {int64_t{dim}, int64_t{dim} + 32}) {
        AlignedBytes target(count * static_cast<uint64_t>(stride) * 2);
        DecodeTarget range{first, count, dtype, target.span().data(), {0, stride, 1}, nullptr, {}};
        REQUIRE_OK(decode_layer(open_segment(bytes), 0, range, Backend::cpu));
        const auto* halves = reinterpret_cast<const uint16_t*>(target.span().data());
        std::vector<float> rows;
        for (uint64_t i = 0; i < count; ++i) {
          for (uint32_t j = 0; j < dim; ++j) {
            const uint16_t half = halves[static_cast<int64_t>(i) * stride + j];
            rows.push_back(dtype == Dtype::f16 ? f32_from_f16(half) : f32_from_bf16(half));
          }
          if (stride > dim) CHECK(halves[static_cast<int64_t>(i) * stride + dim] == 0xa5a5);
        }
        const std::vector<float> wanted(
            want.k.begin() + static_cast<int64_t>(first * dim),
            want.k.begin() + static_cast<int64_t>((first + count) * dim));
        CHECK(relative_error(rows, wanted) <= (dtype == Dtype::f16 ? 5e-4 : 4e-3));
      }
    }
  }
}

TEST_CASE("the instruction set can be held back, and gives the same results") {
  const LayerGeometry geometry{1, 64, 64, 0};
  const LayerValues values = random_values(geometry, 64, 7);
  const cpu::Ops* wide = GENERATE(cpu::avx2_ops(), &cpu::ops());
  if (wide == nullptr) return;
  INFO(wide->name);
  const cpu::Ops& plain = cpu::baseline_ops();
  const cpu::Rows k{values.k.data(), 64, 64, 64};
  std::vector<float> a(64);
  std::vector<float> b(64);
  plain.max_abs(k, nullptr, a.data());
  wide->max_abs(k, nullptr, b.data());
  CHECK(a == b);
  for (float& gain : a) gain /= 127;
  std::vector<uint8_t> x(64 * 64);
  std::vector<uint8_t> y(64 * 64);
  plain.k8_pack(k, nullptr, a.data(), x.data());
  wide->k8_pack(k, nullptr, a.data(), y.data());
  CHECK(x == y);
  plain.v8_pack(k, a.data(), x.data());
  wide->v8_pack(k, a.data(), y.data());
  CHECK(x == y);
  std::vector<float> left(64 * 64);
  std::vector<float> right(64 * 64);
  plain.v8_unpack(x.data(), 64, a.data(), left.data(), 64);
  wide->v8_unpack(x.data(), 64, a.data(), right.data(), 64);
  CHECK(left == right);
  std::vector<uint8_t> v3(64 * 24);
  plain.v3_pack(k, a.data(), v3.data());
  plain.v3_unpack(v3.data(), 64, a.data(), left.data(), 64);
  wide->v3_unpack(v3.data(), 64, a.data(), right.data(), 64);
  CHECK(relative_error(right, left) <= 1e-6);
  for (uint32_t bits = kMinCodebookBits; bits <= kMaxCodebookBits; ++bits) {
    const TensorRule rule = rotated_k(bits);
    std::vector<double> gains(64);
    std::vector<uint8_t> codes(64 * 64);
    std::vector<uint8_t> packed(64 * 8 * bits);
    std::vector<uint8_t> unpacked(codes.size());
    plain.rotated_encode(k, nullptr, rule, codes.data(), gains.data());
    plain.rotated_decode(codes.data(), 64, rule, a.data(), nullptr, left.data(), 64);
    wide->rotated_decode(codes.data(), 64, rule, a.data(), nullptr, right.data(), 64);
    CHECK(relative_error(right, left) <= 1e-6);
    if (bits > 3) {
      plain.k_pack(codes.data(), 64, bits, packed.data());
      wide->k_unpack(packed.data(), 64, bits, unpacked.data());
      CHECK(unpacked == codes);
    }
    if (bits < 6) {
      plain.v_pack(codes.data(), 64, bits, packed.data());
      wide->v_unpack(packed.data(), 64, bits, unpacked.data());
      CHECK(unpacked == codes);
    }
  }
}

TEST_CASE(
    "codes are packed to the same bytes by every instruction set, and nothing else is touched") {
  const cpu::Ops* wide = GENERATE(cpu::avx2_ops(), &cpu::ops());
  if (wide == nullptr) return;
  const cpu::Ops& plain = cpu::baseline_ops();
  std::mt19937 engine(8);
  for (uint32_t bits = kMinCodebookBits; bits <= kMaxCodebookBits; ++bits) {
    for (const uint32_t dims : {16U, 48U, 64U, 80U, 96U, 112U, 128U, 192U, 256U, 1024U}) {
      INFO(wide->name << ": " << bits << " bits, " << dims << " dims");
      const GuardedBytes guarded(size_t{kBlockTokens} * dims);
      const std::span<uint8_t> codes = guarded.span();
      for (uint8_t& code : codes) code = static_cast<uint8_t>(engine() % (1U << bits));
      const auto check = [&](auto pack_of, auto unpack_of) {
        AlignedBytes want(size_t{8} * bits * dims);
        const GuardedBytes got(want.span().size());
        (plain.*pack_of)(codes.data(), dims, bits, want.span().data());
        (wide->*pack_of)(codes.data(), dims, bits, got.span().data());
        CHECK(std::equal(want.span().begin(), want.span().end(), got.span().begin()));
        std::vector<uint8_t> unpacked(codes.size());
        (wide->*unpack_of)(got.span().data(), dims, bits, unpacked.data());
        CHECK(std::equal(codes.begin(), codes.end(), unpacked.begin()));
      };
      if (bits > 3) check(&cpu::Ops::k_pack, &cpu::Ops::k_unpack);
      if (bits < 6) check(&cpu::Ops::v_pack, &cpu::Ops::v_unpack);
    }
  }
}

TEST_CASE("a value between two levels gets the lower one's code by every instruction set") {
  const cpu::Ops* ops = GENERATE(&cpu::baseline_ops(), cpu::avx2_ops(), &cpu::ops());
  if (ops == nullptr) return;
  // All dims alike without turned signs: the transform leaves the first one and exact zeros.
  for (uint32_t bits = kMinCodebookBits; bits <= kMaxCodebookBits; ++bits) {
    for (const uint32_t dims : {16U, 64U, 112U, 256U, 512U, 1024U}) {
      INFO(ops->name << ": " << bits << " bits, " << dims << " dims");
      const std::vector<float> row(dims, 0.75F);
      std::vector<double> gains(kBlockTokens);
      std::vector<uint8_t> codes(size_t{kBlockTokens} * dims);
      ops->rotated_encode({row.data(), dims, 1, dims}, nullptr, {bits, true, false}, codes.data(),
                          gains.data());
      const uint32_t half = 1U << (bits - 1);
      for_each_rotation_block(dims, [&](uint32_t first, uint32_t count) {
        CHECK(codes[first] >= half);
        const auto* begin = codes.data() + first;
        CHECK(std::count(begin + 1, begin + count, half - 1) == count - 1);
      });
    }
  }
}
