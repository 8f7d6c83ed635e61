// Attention to ranges of packed blocks, whatever their number, where they begin and end, and how many rows ask: blocks are
// taken by turns from several streams, and with many rows so many at a time (kernels/cpu/attend_packed.cpp).
#include <catch2/catch.hpp>

#include "kernels/cpu/attend_packed.h"
#include "tests/fuzz/emulated_avx512.h"
#include "tests/support/attention_oracle.h"

using namespace polykv;
using namespace polykv::test;

namespace {

std::vector<const cpu::AttendOps*> all_ops() {
  std::vector<const cpu::AttendOps*> all;
  for (const cpu::AttendOps* ops : {
#ifdef POLYKV_EMULATE_AVX512
           cpu::emulated_avx512_attend_ops()
#else
           cpu::avx2_attend_ops(), cpu::avx512_attend_ops()
#endif
       }) {
    if (ops != nullptr) all.push_back(ops);
  }
  return all;
}

struct Range {
  uint64_t first;
  uint64_t end;
};

class Bench {
 public:
  Bench(uint32_t kv_heads, uint64_t tokens)
      : geometry_{kv_heads, 16, 16, 0},
        values_(random_values(geometry_, tokens, 3)),
        bytes_(build_segment(test_spec(test_model({geometry_}), Profile::k5v4, tokens, options()),
                             {values_}, options())),
        view_(open_segment(bytes_)),
        layer_(view_.layer(0)),
        decoded_(decode_all(view_, 0, Backend::reference)),
        q_(random_values({kMostRows * kv_heads, 16, 16, 0}, 1, 5).k) {
    for (uint32_t row = 0; row < kMostRows * kv_heads; ++row) {
      for (uint32_t head = 0; head < kv_heads; ++head)
        tolerances_.push_back(logit_tolerance(layer_, decoded_, head, &q_[size_t{row} * 16]));
    }
  }

  /// The range's largest error over what it may be; above 1 is wrong.
  double error(const cpu::AttendOps& ops, const Range& range, uint32_t rows) const {
    AttendQueries queries;
    queries.head_count = rows * geometry_.kv_head_count;
    queries.row_count = 1;
    queries.q = q_.data();
    double worst = 0;
    std::vector<double> want;
    std::vector<float> got(16);
    AttendScratch scratch;
    for (uint32_t head = 0; head < geometry_.kv_head_count; ++head) {
      std::vector<AttendPart> part(1, AttendPart(rows, 16));
      REQUIRE(cpu::attend_packed(ops, layer_, head, kFirstToken, range.first,
                                 range.end - range.first, queries, part[0], scratch));
      // The first, the last, and one of a tile in between.
      for (const uint32_t row : {0U, rows / 2, rows - 1}) {
        const size_t at = size_t{head} * rows + row;
        const double want_sum =
            plain_attention(decoded_, head, &q_[at * 16], range.first, range.end, 0, want);
        const float sum = join_parts(part, row, 16, got.data());
        const double tolerance = tolerances_[at * geometry_.kv_head_count + head];
        worst = std::max(worst, std::abs(sum - want_sum) / tolerance);
        for (uint32_t i = 0; i < 16; ++i) {
          worst = std::max(worst, std::abs(got[i] - want[i]) / ((2 * tolerance + 6e-5) * kMostV));
        }
      }
    }
    return worst;
  }

 private:
  static constexpr uint64_t kFirstToken = 4096;  // no exact rows
  static constexpr double kMostV = 5;
  static constexpr uint32_t kMostRows = 12;
  static SegmentOptions options() {
    SegmentOptions options;
    options.first_token = kFirstToken;
    return options;
  }

  LayerGeometry geometry_;
  LayerValues values_;
  AlignedBytes bytes_;
  SegmentView view_;
  LayerView layer_;
  LayerValues decoded_;
  std::vector<float> q_;
  std::vector<double> tolerances_;  // [row of q_, kv_head]
};

}  // namespace

TEST_CASE("every number of blocks, from every block on, for few rows and many") {
  constexpr uint64_t kBlocks = 21;
  for (const uint32_t kv_heads : {1U, 2U}) {
    const Bench bench(kv_heads, kBlocks * kBlockTokens - 5);
    for (const cpu::AttendOps* ops : all_ops()) {
      for (const uint32_t rows : {1U, 5U, 12U}) {
        for (const uint64_t first_block : {0U, 1U, 3U}) {
          for (uint64_t count = 1; first_block + count <= kBlocks; ++count) {
            const uint64_t first = first_block * kBlockTokens;
            const uint64_t end = std::min(first + count * kBlockTokens, kBlocks * kBlockTokens - 5);
            // Whole blocks, and parts of the first and the last.
            for (const Range& range : {Range{first, end}, Range{first + 9, end - 7}}) {
              INFO(ops->name << ", " << kv_heads << " kv_heads, " << rows << " rows, tokens "
                             << range.first << " to " << range.end);
              CHECK(bench.error(*ops, range, rows) <= 1);
            }
          }
        }
      }
    }
  }
}
