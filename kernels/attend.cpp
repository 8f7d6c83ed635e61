#include "kernels/attend.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cpu/tensors.h"

namespace polykv {

namespace {

constexpr uint64_t kChunkOfTokens = 4 * kBlockTokens;  // K and V of one head stay in the L2 cache
constexpr uint32_t kTileRows = 16;                     // and these queries in L1

/// The layer as if it had this kv_head alone.
LayerView only_head(const LayerView& layer, uint32_t kv_head) {
  LayerView head = layer;
  const LayerGeometry& geometry = layer.geometry;
  head.geometry.kv_head_count = 1;
  head.blocks = layer.block(kv_head, 0);
  const size_t exact_rows = size_t{kv_head} * layer.exact_row_capacity;
  if (layer.k_means != nullptr) head.k_means = layer.k_means + kv_head * geometry.k_head_dim;
  if (layer.exact_k != nullptr) head.exact_k = layer.exact_k + exact_rows * geometry.k_head_dim;
  if (layer.exact_v != nullptr) head.exact_v = layer.exact_v + exact_rows * geometry.v_head_dim;
  return head;
}

void decode_head(const Codec& codec, const LayerView& head, uint64_t first, uint64_t count,
                 AttendScratch& scratch) {
  const int64_t k_dim = head.geometry.k_head_dim;
  const int64_t v_dim = head.geometry.v_head_dim;
  codec.decode(
      head,
      {first, count, Dtype::f32, scratch.k.data(), {0, k_dim, 1}, scratch.v.data(), {0, v_dim, 1}});
}

/// How many of `count` tokens from document token `token` on come before a row's first.
uint64_t unseen(const AttendQueries& queries, uint32_t row, uint64_t token, uint64_t count) {
  if (queries.first_tokens == nullptr || queries.first_tokens[row] <= token) return 0;
  return std::min(count, queries.first_tokens[row] - token);
}

/// Compared as integers: an infinity and every NaN are above all numbers.
bool all_finite(const float* values, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffU);
  return largest < 0x7f800000U;
}

}  // namespace

bool attend_tokens(const Codec& codec, const LayerView& layer, uint32_t kv_head,
                   uint64_t document_token, uint64_t first_token, uint64_t token_count,
                   const AttendQueries& queries, AttendPart& part, AttendScratch& scratch) {
  const AttentionRows& rows = attention_rows();
  const LayerView head = only_head(layer, kv_head);
  const size_t k_dim = layer.geometry.k_head_dim;
  const size_t v_dim = layer.geometry.v_head_dim;
  const uint32_t group_rows = queries.head_count / layer.geometry.kv_head_count * queries.row_count;
  const float* q = queries.q + size_t{kv_head} * group_rows * k_dim;
  scratch.k.resize(kChunkOfTokens * k_dim);
  scratch.v.resize(kChunkOfTokens * v_dim);
  scratch.scores.resize(kChunkOfTokens * kTileRows);

  const uint64_t end = first_token + token_count;
  for (uint64_t first = first_token; first < end;) {
    // Whole blocks, but for the range's own ends.
    const uint64_t next = std::min((first / kChunkOfTokens + 1) * kChunkOfTokens, end);
    const uint64_t count = next - first;
    const uint64_t token = document_token + first;
    first = next;
    uint64_t unseen_by_all = count;
    for (uint32_t row = 0; row < queries.row_count; ++row)
      unseen_by_all = std::min(unseen_by_all, unseen(queries, row, token, count));
    if (unseen_by_all == count) continue;
    decode_head(codec, head, next - count, count, scratch);
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
        const uint64_t skipped = unseen(queries, (tile + i) % queries.row_count, token, count);
        std::fill(row_scores, row_scores + skipped, 0.0F);
        if (skipped == count) continue;
        float* output = &part.outputs[(tile + i) * v_dim];
        const float rescale = rows.softmax_block(row_scores + skipped, count - skipped,
                                                 count - skipped, &part.states[tile + i]);
        if (rescale != 1.0F) rows.scale(output, rescale, v_dim, output);
      }
      rows.few_outputs(scores, tile_rows, scratch.v.data(), count, v_dim,
                       &part.outputs[tile * v_dim]);
    }
  }
  return true;
}

float join_parts(std::span<const AttendPart> parts, uint32_t row, uint32_t v_head_dim,
                 float* output) {
  const AttentionRows& rows = attention_rows();
  std::fill(output, output + v_head_dim, 0.0F);
  float maximum = SoftmaxState().maximum;
  for (const AttendPart& part : parts) maximum = std::max(maximum, part.states[row].maximum);
  float sum = 0;
  for (const AttendPart& part : parts) {
    const SoftmaxState& state = part.states[row];
    if (state.sum == 0) continue;
    const float weight = std::exp(state.maximum - maximum);
    sum += weight * state.sum;
    rows.add_scaled(&part.outputs[size_t{row} * v_head_dim], weight, v_head_dim, output);
  }
  if (sum == 0) return -std::numeric_limits<float>::infinity();
  rows.scale(output, 1.0F / sum, v_head_dim, output);
  return maximum + std::log(sum);
}

Status merge_attention(std::span<const AttentionResult> results, uint64_t row_count,
                       uint32_t v_head_dim, Dtype dtype, void* output, float* log_sum_exp) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < results.size(); ++i) {
    for (uint64_t row = 0; row < row_count; ++row) {
      const float log_sum = results[i].log_sum_exp[row];
      if (std::isfinite(log_sum) || log_sum == kNothing) continue;
      return {POLYKV_ERR_INVALID_ARGUMENT,
              format("merge attention: log_sum_exp of result %zu is %g in row %llu", i,
                     static_cast<double>(log_sum), static_cast<unsigned long long>(row))};
    }
  }
  const AttentionRows& rows = attention_rows();
  const size_t row_bytes = v_head_dim * dtype_size_bytes(dtype);
  std::vector<float> merged(v_head_dim);
  std::vector<float> one(v_head_dim);
  for (uint64_t row = 0; row < row_count; ++row) {
    float maximum = kNothing;
    for (const AttentionResult& result : results)
      maximum = std::max(maximum, result.log_sum_exp[row]);
    std::fill(merged.begin(), merged.end(), 0.0F);
    float sum = 0;
    for (const AttentionResult& result : results) {
      // Its output may be anything, even no number.
      if (result.log_sum_exp[row] == kNothing) continue;
      const float weight = std::exp(result.log_sum_exp[row] - maximum);
      sum += weight;
      cpu::load_row(dtype, static_cast<const uint8_t*>(result.output) + row * row_bytes, one.data(),
                    v_head_dim);
      rows.add_scaled(one.data(), weight, v_head_dim, merged.data());
    }
    if (sum > 0) rows.scale(merged.data(), 1.0F / sum, v_head_dim, merged.data());
    cpu::store_row(dtype, merged.data(), static_cast<uint8_t*>(output) + row * row_bytes,
                   v_head_dim);
    if (log_sum_exp != nullptr) log_sum_exp[row] = sum > 0 ? maximum + std::log(sum) : kNothing;
  }
  return Status::ok();
}

}  // namespace polykv
