#include "kernels/attend.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/attend_packed.h"
#include "kernels/cpu/attend_plain.h"
#include "kernels/cpu/tensors.h"

namespace polykv {

namespace {

constexpr uint64_t kChunkOfTokens = 4 * kBlockTokens;  // K and V of one head stay in the L2 cache

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

/// attend_tokens for what has no faster way.
bool attend_decoded(const Codec& codec, const LayerView& layer, uint32_t kv_head,
                    uint64_t document_token, uint64_t first_token, uint64_t token_count,
                    const AttendQueries& queries, AttendPart& part, AttendScratch& scratch) {
  const LayerView head = only_head(layer, kv_head);
  const LayerGeometry& geometry = head.geometry;
  const float* q = queries.q + part.states.size() * kv_head * geometry.k_head_dim;
  scratch.k.resize(std::max<size_t>(scratch.k.size(), kChunkOfTokens * geometry.k_head_dim));
  scratch.v.resize(std::max<size_t>(scratch.v.size(), kChunkOfTokens * geometry.v_head_dim));
  const uint64_t end = first_token + token_count;
  for (uint64_t first = first_token; first < end;) {
    // Whole blocks, but for the range's own ends.
    const uint64_t next = std::min((first / kChunkOfTokens + 1) * kChunkOfTokens, end);
    const uint64_t count = next - first;
    scratch.skipped.assign(queries.row_count, 0);
    for (uint32_t row = 0; row < queries.row_count; ++row)
      scratch.skipped[row] = unseen(queries, row, document_token + first, count);
    if (*std::min_element(scratch.skipped.begin(), scratch.skipped.end()) < count) {
      decode_head(codec, head, first, count, scratch);
      if (!cpu::attend_plain(q, geometry, count, queries, scratch.skipped, part, scratch))
        return false;
    }
    first = next;
  }
  return true;
}

}  // namespace

bool attend_tokens(const Codec& codec, const LayerView& layer, uint32_t kv_head,
                   uint64_t document_token, uint64_t first_token, uint64_t token_count,
                   const AttendQueries& queries, AttendPart& part, AttendScratch& scratch) {
  if (const cpu::AttendOps* ops = cpu::packed_ops_for(layer)) {
    return cpu::attend_packed(*ops, layer, kv_head, document_token, first_token, token_count,
                              queries, part, scratch);
  }
  return attend_decoded(codec, layer, kv_head, document_token, first_token, token_count, queries,
                        part, scratch);
}

float join_parts(std::span<const AttendPart> parts, uint32_t row, uint32_t v_head_dim,
                 float* output) {
  std::fill(output, output + v_head_dim, 0.0F);
  SoftmaxState state;
  for (const AttendPart& part : parts) {
    cpu::take_in(part.states[row], &part.outputs[size_t{row} * v_head_dim], v_head_dim, state,
                 output);
  }
  if (state.sum == 0) return -std::numeric_limits<float>::infinity();
  attention_rows().scale(output, 1.0F / state.sum, v_head_dim, output);
  return state.maximum + std::log(state.sum);
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
