#include "kernels/cpu/attend_plain.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace polykv::cpu {

namespace {
constexpr uint32_t kTileRows = 16;  // whose scores stay in L1 beside a few hundred tokens
}

bool all_finite(const float* values, size_t count) {
  // Compared as integers: an infinity and every NaN are above all numbers.
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffU);
  return largest < 0x7f800000U;
}

bool attend_plain(const float* q, const LayerGeometry& geometry, size_t count,
                  const AttendQueries& queries, std::span<const size_t> skipped, AttendPart& part,
                  AttendScratch& scratch) {
  const AttentionRows& rows = attention_rows();
  const size_t k_dim = geometry.k_head_dim;
  const size_t v_dim = geometry.v_head_dim;
  const auto group_rows = static_cast<uint32_t>(part.states.size());
  scratch.scores.resize(std::max(scratch.scores.size(), count * kTileRows));
  for (uint32_t tile = 0; tile < group_rows; tile += kTileRows) {
    const uint32_t tile_rows = std::min(kTileRows, group_rows - tile);
    float* scores = scratch.scores.data();
    rows.few_scores(q + tile * k_dim, tile_rows, scratch.k.data(), count, k_dim, scores);
    // The row kernels must not meet an infinity.
    if (!all_finite(scores, tile_rows * count)) return false;
    if (queries.soft_cap > 0) {
      for (size_t i = 0; i < tile_rows * count; ++i)
        scores[i] = queries.soft_cap * std::tanh(scores[i] / queries.soft_cap);
    }
    for (uint32_t i = 0; i < tile_rows; ++i) {
      float* row_scores = scores + i * count;
      const size_t unseen = skipped[(tile + i) % queries.row_count];
      std::fill(row_scores, row_scores + unseen, 0.0F);
      if (unseen == count) continue;
      float* output = &part.outputs[(tile + i) * v_dim];
      const float rescale = rows.softmax_block(row_scores + unseen, count - unseen, count - unseen,
                                               &part.states[tile + i]);
      if (rescale != 1.0F) rows.scale(output, rescale, v_dim, output);
    }
    rows.few_outputs(scores, tile_rows, scratch.v.data(), count, v_dim,
                     &part.outputs[tile * v_dim]);
  }
  return true;
}

void take_in(const SoftmaxState& other, const float* other_output, uint32_t dims,
             SoftmaxState& state, float* output) {
  if (other.sum == 0) return;
  const float maximum = std::max(state.maximum, other.maximum);
  const float before = state.sum == 0 ? 0.0F : std::exp(state.maximum - maximum);
  const float weight = std::exp(other.maximum - maximum);
  state.sum = state.sum * before + other.sum * weight;
  state.maximum = maximum;
  attention_rows().scale(output, before, dims, output);
  attention_rows().add_scaled(other_output, weight, dims, output);
}

}  // namespace polykv::cpu
