#include "daemon/prefill/eval/attend_segment.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <span>
#include <thread>
#include <vector>

#include "kernels/attend.h"

namespace polykv::eval {

namespace {

constexpr uint32_t kItemRows = 32;  // queries of one kv_head's heads: work for one thread

/// The item's queries times 1 / sqrt(k_head_dim), [kv_head, head of the group, row, dim]. Only those of `kv_head` are set,
/// which are all that is read of them.
void load_queries(const PrefixQueries& queries, const LayerGeometry& geometry, uint32_t kv_head,
                  uint32_t first_row, uint32_t row_count, std::vector<float>& q) {
  const size_t dim = geometry.k_head_dim;
  const uint32_t group = queries.head_count / geometry.kv_head_count;
  const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
  q.resize(size_t{queries.head_count} * row_count * dim);
  for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (uint32_t row = 0; row < row_count; ++row) {
      const float* source = queries.q + (first_row + row) * queries.q_stride + head * dim;
      float* target = &q[(size_t{head} * row_count + row) * dim];
      for (size_t i = 0; i < dim; ++i) target[i] = source[i] * scale;
    }
  }
}

bool attend_item(const LayerView& layer, const PrefixQueries& queries, uint32_t kv_head,
                 uint32_t first_row, float* output, float* log_sum_exp) {
  const uint32_t dim = layer.geometry.v_head_dim;
  const uint32_t group = queries.head_count / layer.geometry.kv_head_count;
  const uint32_t rows = std::min(kItemRows, queries.row_count - first_row);
  std::vector<float> q;
  load_queries(queries, layer.geometry, kv_head, first_row, rows, q);
  AttendQueries item;
  item.head_count = queries.head_count;
  item.row_count = rows;
  item.q = q.data();
  AttendPart part(group * rows, dim);
  AttendScratch scratch;
  if (!attend_tokens(*codec_for(layer.profile), layer, kv_head, 0, 0, layer.token_count, item, part,
                     scratch)) {
    return false;
  }
  for (uint32_t i = 0; i < group * rows; ++i) {
    const size_t row = first_row + i % rows;
    const size_t at = row * queries.head_count + kv_head * group + i / rows;
    log_sum_exp[at] = join_parts(std::span(&part, 1), i, dim, output + at * dim);
  }
  return true;
}

}  // namespace

Status SegmentPrefix::attend(const PrefixQueries& queries, float* output,
                             float* log_sum_exp) const {
  const LayerView layer = view_.layer(queries.layer);
  const uint32_t kv_heads = layer.geometry.kv_head_count;
  const uint32_t item_count = (queries.row_count + kItemRows - 1) / kItemRows * kv_heads;
  std::atomic<uint32_t> next_item{
      0};  // relaxed: it only hands out numbers; joining orders the rest
  std::atomic<bool> is_beyond_fp32{false};
  const auto work = [&] {
    for (uint32_t item; (item = next_item.fetch_add(1, std::memory_order_relaxed)) < item_count;) {
      if (!attend_item(layer, queries, item % kv_heads, item / kv_heads * kItemRows, output,
                       log_sum_exp)) {
        is_beyond_fp32 = true;
      }
    }
  };
  std::vector<std::jthread> threads;
  for (uint32_t i = 1; i < std::min(queries.thread_count, item_count); ++i)
    threads.emplace_back(work);
  work();
  threads.clear();
  if (!is_beyond_fp32) return Status::ok();
  return {POLYKV_ERR_INVALID_ARGUMENT,
          format("attend to layer %u: a logit is beyond fp32", queries.layer)};
}

}  // namespace polykv::eval
