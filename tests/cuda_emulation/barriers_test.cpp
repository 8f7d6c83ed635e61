// Each barrier of each kernel is taken away in turn: in one of several schedules something comes out
// otherwise. Where nothing can, the table says why, and the test that nothing does.
#include <catch2/catch.hpp>
#include <functional>
#include <random>

#include "kernels/cuda/attend_launcher.h"
#include "kernels/cuda/checksum_launcher.h"
#include "kernels/cuda/decode_launcher.h"
#include "kernels/cuda/encode_launcher.h"
#include "kernels/segment_parts.h"
#include "tests/cuda_emulation/device_calls.h"
#include "tests/support/segments.h"

using namespace polykv;
using namespace polykv::cuda;
using namespace polykv::test;

namespace {

const LayerGeometry kGeometry = {2, 80, 96, 0};
// So many that warps of attention take two blocks each.
constexpr uint64_t kTokens = 330;

AlignedBytes document(Profile profile, const LayerGeometry& geometry) {
  SegmentOptions options;
  const bool has_exact_rows = codec_for(profile)->has_exact_rows;
  if (has_exact_rows) options.chosen = {70, 149};
  options.chosen_exact_rows = has_exact_rows ? 2 : 0;
  return build_segment(test_spec(test_model({geometry}), profile, kTokens, options),
                       {random_values(geometry, kTokens, 1)}, options);
}

std::vector<uint8_t> random_bytes(size_t count) {
  std::mt19937 random(1);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

/// What came out, or how it ended.
struct Observed {
  std::string failure;
  std::vector<uint8_t> bytes;
  bool operator==(const Observed&) const = default;

  template <typename T>
  void add(const std::vector<T>& values) {
    const auto* data = reinterpret_cast<const uint8_t*>(values.data());
    bytes.insert(bytes.end(), data, data + values.size() * sizeof(T));
  }
};

Observed decode_as(Profile profile, const LayerGeometry& geometry, const Schedule& schedule) {
  const AlignedBytes bytes = document(profile, geometry);
  LayerValues values = empty_values(geometry, kTokens);
  const KvSource where = values.source();
  const DecodeTarget target = {
      0, kTokens, Dtype::f32, values.k.data(), where.k_strides, values.v.data(), where.v_strides};
  Observed seen;
  seen.failure = device_decode(open_segment(bytes).layer(0), target, schedule).message();
  seen.add(values.k);
  seen.add(values.v);
  return seen;
}

Observed attend_as(Profile profile, const LayerGeometry& geometry, uint32_t group,
                   Products products, const Schedule& schedule) {
  const AlignedBytes bytes = document(profile, geometry);
  const std::vector<AttendRun> runs = {{open_segment(bytes).layer(0), 0, 0, kTokens}};
  std::vector<float> q(size_t{2} * group * geometry.k_head_dim);
  for (size_t i = 0; i < q.size(); ++i) q[i] = 0.02F * static_cast<float>(i % 11) - 0.1F;
  std::vector<float> output(size_t{2} * group * geometry.v_head_dim);
  AttendCall call;
  call.runs = runs;
  call.query_count = 1;
  call.head_count = 2 * group;
  call.q = q.data();
  call.q_strides = {0, geometry.k_head_dim, 1};
  call.output = output.data();
  call.output_strides = {0, geometry.v_head_dim, 1};
  call.products = products;
  Observed seen;
  seen.failure = device_attend(call, 1, schedule).message();
  seen.add(output);
  return seen;
}

/// Twice: with values that fit, and with one late in the layer that does not.
Observed encode_as(Profile profile, const LayerGeometry& geometry, const Schedule& schedule) {
  Observed seen;
  for (const bool is_bad : {false, true}) {
    LayerValues values = random_values(geometry, kTokens, 2);
    if (is_bad) values.v[values.v.size() - 3] = NAN;
    SegmentOptions options;
    options.first_token = later_token(profile);
    const SegmentLayout layout =
        *plan_segment(test_spec(test_model({geometry}), profile, kTokens, options));
    AlignedBytes bytes(layout.header.total_bytes);
    std::fill(bytes.span().begin(), bytes.span().end(), uint8_t{0});
    LayerSlot slot = layer_parts<LayerSlot>(layout.header, layout.records[0], bytes.span().data());
    seen.failure += device_encode(values.source(), slot, schedule).message();
    if (is_bad) continue;
    seen.add(std::vector<uint8_t>(bytes.span().begin(), bytes.span().end()));
    seen.add(std::vector<LayerScales>{slot.scales});
  }
  return seen;
}

struct Barrier {
  const std::type_info& kernel;
  uint32_t number;
  const char* why_not = nullptr;  // it is not missed
};

/// Something to do, and barriers that it needs.
struct Subject {
  std::function<Observed(const Schedule&)> observe;
  std::vector<Barrier> barriers;
};

constexpr char kExchange[] =
    "the lanes exchange words before they come to what it guards, and what they read is in them";

Subject decoding_packed() {
  using Kernel = DecodeKernel<int16_t>;
  return {[](const Schedule& schedule) { return decode_as(Profile::k5v4, kGeometry, schedule); },
          {{typeid(Kernel), Kernel::kUnpacked},
           {typeid(Kernel), Kernel::kPiecesDone},
           {typeid(Kernel), Kernel::kAllStored}}};
}

Subject decoding_paper() {
  using Kernel = DecodeKernel<float>;
  return {[](const Schedule& schedule) {
            return decode_as(Profile::paper_k8v3, {2, 80, 64, 0}, schedule);
          },
          {{typeid(Kernel), Kernel::kUnpacked},
           {typeid(Kernel), Kernel::kPiecesDone},
           {typeid(Kernel), Kernel::kPassDone},
           {typeid(Kernel), Kernel::kAllStored,
            "paper-k8v3 has no exact rows, and those are what it guards"}}};
}

Subject preparing_and_joining() {
  using Prepare = PrepareQueriesKernel;
  using Join = JoinSplitsKernel;
  return {[](const Schedule& schedule) {
            return attend_as(Profile::k5v4, kGeometry, 3, Products::scalar, schedule);
          },
          {{typeid(Prepare), Prepare::kLoaded},
           {typeid(Prepare), Prepare::kPiecesDone},
           {typeid(Prepare), Prepare::kRotated},
           {typeid(Join), Join::kAdded},
           {typeid(Join), Join::kPiecesDone},
           {typeid(Join), Join::kTransformed,
            "the whole block's barrier follows at once; other users of transform_row have none"},
           {typeid(Join), Join::kRotated}}};
}

template <uint32_t Rows>
Subject attending(Profile profile) {
  using Kernel = AttendPackedKernel<Rows>;
  return {[=](const Schedule& schedule) {
            return attend_as(profile, kGeometry, Rows, Products::scalar, schedule);
          },
          {{typeid(Kernel), Kernel::kQueriesLoaded},
           {typeid(Kernel), Kernel::kWeightsWritten},
           {typeid(Kernel), Kernel::kWeightsUsed, kExchange},
           {typeid(Kernel), Kernel::kWarpsDone}}};
}

Subject attending_plain() {
  using Kernel = AttendPlainKernel;
  return {[](const Schedule& schedule) {
            return attend_as(Profile::exact, kGeometry, 3, Products::automatic, schedule);
          },
          {{typeid(Kernel), Kernel::kQueriesLoaded}, {typeid(Kernel), Kernel::kWarpsDone}}};
}

/// V of two halves of 128 dims.
Subject attending_tiled() {
  using Kernel = AttendTiledKernel<kMaxDeviceHeadDim, 1>;
  return {[](const Schedule& schedule) {
            return attend_as(Profile::k5v4, {2, 64, 192, 0}, 3, Products::tensor, schedule);
          },
          {{typeid(Kernel), Kernel::kQueriesLoaded},
           {typeid(Kernel), Kernel::kRead},
           {typeid(Kernel), Kernel::kWarpsDone}}};
}

Subject attending_large_tiles() {
  using Kernel = AttendTiledKernel<kMostLargeTileDims, 4>;
  return {[](const Schedule& schedule) {
            return attend_as(Profile::k8v3, kGeometry, 17, Products::tensor, schedule);
          },
          {{typeid(Kernel), Kernel::kQueriesLoaded},
           {typeid(Kernel), Kernel::kUnpacked},
           {typeid(Kernel), Kernel::kUsed}}};
}

Subject attending_paper() {
  using Kernel = AttendPlainKernel;
  return {[](const Schedule& schedule) {
            return attend_as(Profile::paper_k8v3, {2, 80, 64, 0}, 3, Products::automatic, schedule);
          },
          {{typeid(Kernel), Kernel::kQueriesLoaded}, {typeid(Kernel), Kernel::kWarpsDone}}};
}

Subject encoding_rotated() {
  using Rows = EncodeRowsKernel;
  return {[](const Schedule& schedule) { return encode_as(Profile::k5v4, kGeometry, schedule); },
          {{typeid(EncodeScanKernel), EncodeScanKernel::kRowsScanned},
           {typeid(EncodeScalesKernel), EncodeScalesKernel::kThreadsDone},
           {typeid(Rows), Rows::kTableMade},
           {typeid(Rows), Rows::kRowLoaded},
           {typeid(Rows), Rows::kPiecesDone},
           {typeid(Rows), Rows::kRotated},
           {typeid(Rows), Rows::kRowRead, kExchange},
           {typeid(Rows), Rows::kRowsCoded}}};
}

Subject encoding_int8() {
  using Kernel = EncodeFinishKernel;
  return {[](const Schedule& schedule) { return encode_as(Profile::k8v8, kGeometry, schedule); },
          {{typeid(Kernel), Kernel::kGainsStored}, {typeid(Kernel), Kernel::kRowsCoded}}};
}

Subject encoding_paper() {
  using Rows = EncodeRowsKernel;
  using Finish = EncodeFinishKernel;
  return {[](const Schedule& schedule) {
            return encode_as(Profile::paper_k8v3, {2, 80, 64, 0}, schedule);
          },
          {{typeid(Rows), Rows::kTableMade, "paper-k8v3's levels are not looked up in a table"},
           {typeid(Rows), Rows::kRowLoaded},
           {typeid(Rows), Rows::kRowsCoded},
           {typeid(Finish), Finish::kGainsStored},
           {typeid(Finish), Finish::kRowsCoded}}};
}

Subject encoding_exact() {
  return {[](const Schedule& schedule) { return encode_as(Profile::exact, kGeometry, schedule); },
          {{typeid(EncodeCopyKernel), EncodeCopyKernel::kCopied}}};
}

Subject checksumming() {
  using Kernel = ChecksumKernel;
  return {[](const Schedule& schedule) {
            // Two rounds, so that half of what is shared is used twice.
            const std::vector<uint8_t> bytes = random_bytes(70'000);
            const ChecksumRange range{bytes.data(), bytes.size()};
            std::vector<uint64_t> sum(1);
            Observed seen;
            seen.failure = device_checksum({&range, 1}, sum.data(), schedule).message();
            seen.add(sum);
            return seen;
          },
          {{typeid(Kernel), Kernel::kGroupsAdded}, {typeid(Kernel), Kernel::kSumsStored}}};
}

/// In how many schedules a barrier is missed; the first is enough unless `all` are to be tried.
uint32_t count_missed(const Subject& subject, const Observed& want, const Barrier& barrier,
                      bool all) {
  uint32_t missed = 0;
  for (Schedule schedule :
       {Schedule{Order::ascending}, {Order::descending}, {Order::random, 1}, {Order::random, 2}}) {
    schedule.removed_sync = barrier.number;
    schedule.removed_from = &barrier.kernel;
    missed += subject.observe(schedule) == want ? 0 : 1;
    if (missed > 0 && !all) break;
  }
  return missed;
}

}  // namespace

TEST_CASE("no barrier can be taken away unnoticed, but for those that say why") {
  uint32_t needed = 0;
  for (const Subject& subject :
       {decoding_packed(), decoding_paper(), preparing_and_joining(), attending<1>(Profile::k5v4),
        attending<2>(Profile::k8v8), attending<4>(Profile::k4v3), attending<8>(Profile::k6v5),
        attending_plain(), attending_tiled(), attending_large_tiles(), encoding_rotated(),
        attending_paper(), encoding_int8(), encoding_paper(), encoding_exact(), checksumming()}) {
    const Observed want = subject.observe({});
    REQUIRE(subject.observe({Order::random, 1}) == want);
    for (const Barrier& barrier : subject.barriers) {
      const bool is_excused = barrier.why_not != nullptr;
      INFO(barrier.kernel.name() << " barrier " << barrier.number << ": "
                                 << (is_excused ? barrier.why_not : "nobody missed it"));
      const uint32_t missed = count_missed(subject, want, barrier, is_excused);
      CHECK((missed == 0) == is_excused);
      needed += is_excused ? 0 : 1;
    }
  }
  CHECK(needed == 50);
}
