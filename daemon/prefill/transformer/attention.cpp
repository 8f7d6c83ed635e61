#include "daemon/prefill/transformer/attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "daemon/prefill/transformer/blas.h"
#include "kernels/cpu/attend_plain.h"

namespace polykv {

namespace {
constexpr uint32_t kTileRows = 64;
constexpr uint32_t kBlockKeys = 512;
constexpr size_t kFewRows = 8;           // up to this, a matrix product costs more than it saves
constexpr uint32_t kItemsPerThread = 4;  // enough for dynamic scheduling to level out

uint32_t divide_up(uint32_t a, uint32_t b) {
  return (a + b - 1) / b;
}
}  // namespace

void Attention::plan(const AttentionShape& shape, const KvCache& cache) {
  const uint32_t tile_count = divide_up(shape.row_count, kTileRows);
  const uint32_t task_count = tile_count * cache.kv_head_count();
  const uint32_t key_count = shape.first_key + shape.row_count;
  const uint32_t wanted = divide_up(kItemsPerThread * shape.thread_count, task_count);
  range_count_ = std::clamp(wanted, 1U, divide_up(key_count, kBlockKeys));
  const size_t group = shape.head_count / cache.kv_head_count();

  items_.clear();
  size_t state_count = 0;
  // The last tile sees the most keys: long items first.
  for (uint32_t tile = tile_count; tile-- > 0;) {
    const uint32_t row_begin = tile * kTileRows;
    const uint32_t rows = std::min(kTileRows, shape.row_count - row_begin);
    const uint32_t keys = shape.first_key + row_begin + rows;
    const uint32_t range_keys = divide_up(divide_up(keys, range_count_), 64) * 64;
    for (uint32_t kv_head = 0; kv_head < cache.kv_head_count(); ++kv_head) {
      for (uint32_t range = 0; range < range_count_; ++range) {
        const uint32_t key_begin = std::min(range * range_keys, keys);
        const uint32_t key_end = std::min(key_begin + range_keys, keys);
        items_.push_back({kv_head, row_begin, rows, key_begin, key_end, state_count});
        state_count += group * rows;
      }
    }
  }
  states_.assign(state_count, SoftmaxState());
  outputs_.assign(state_count * cache.head_dim(), 0.0F);
  buffers_.resize(std::max<size_t>(buffers_.size(), shape.thread_count));
}

void Attention::compute(const AttentionShape& shape, const float* q, const KvCache& cache,
                        uint32_t layer, const Item& item, Buffers* buffers) {
  const AttentionRows& kernels = attention_rows();
  const uint32_t dim = cache.head_dim();
  const uint32_t group = shape.head_count / cache.kv_head_count();
  const uint32_t rows = item.row_count;
  const size_t stacked = size_t{group} * rows;
  buffers->q.resize(std::max(buffers->q.size(), stacked * dim));
  buffers->scores.resize(std::max(buffers->scores.size(), stacked * kBlockKeys));

  const float factor = 1.0F / std::sqrt(static_cast<float>(dim));
  for (uint32_t g = 0; g < group; ++g) {
    for (uint32_t r = 0; r < rows; ++r) {
      const float* source =
          q + (item.row_begin + r) * shape.q_stride + size_t{item.kv_head * group + g} * dim;
      kernels.scale(source, factor, dim, &buffers->q[(size_t{g} * rows + r) * dim]);
    }
  }

  const float* keys = cache.k(layer) + item.kv_head * cache.head_stride();
  const float* values = cache.v(layer) + item.kv_head * cache.head_stride();
  float* output = &outputs_[item.first_state * dim];
  SoftmaxState* states = &states_[item.first_state];
  float* scores = buffers->scores.data();
  for (uint32_t key = item.key_begin; key < item.key_end; key += kBlockKeys) {
    const uint32_t count = std::min(kBlockKeys, item.key_end - key);
    if (stacked <= kFewRows) {
      kernels.few_scores(buffers->q.data(), stacked, keys + size_t{key} * dim, count, dim, scores);
    } else {
      multiply_transposed(buffers->q.data(), keys + size_t{key} * dim, scores,
                          static_cast<int64_t>(stacked), count, dim, Store::overwrite);
    }
    for (size_t i = 0; i < stacked; ++i) {
      const auto row = static_cast<uint32_t>(i % rows);
      const uint32_t visible = shape.first_key + item.row_begin + row + 1;
      const uint32_t valid = visible <= key ? 0 : std::min(count, visible - key);
      float* row_scores = scores + i * count;
      if (valid == 0) {
        std::fill(row_scores, row_scores + count, 0.0F);
        continue;
      }
      const float rescale = kernels.softmax_block(row_scores, valid, count, &states[i]);
      if (rescale != 1.0F) kernels.scale(output + i * dim, rescale, dim, output + i * dim);
    }
    if (stacked <= kFewRows) {
      kernels.few_outputs(scores, stacked, values + size_t{key} * dim, count, dim, output);
    } else {
      multiply_add(scores, values + size_t{key} * dim, output, static_cast<int64_t>(stacked), dim,
                   count);
    }
  }
}

void Attention::join(const AttentionShape& shape, const KvCache& cache, size_t first_item,
                     float* out) {
  const uint32_t dim = cache.head_dim();
  const uint32_t group = shape.head_count / cache.kv_head_count();
  const Item& first = items_[first_item];
  for (size_t i = 0; i < size_t{group} * first.row_count; ++i) {
    const uint32_t row = first.row_begin + static_cast<uint32_t>(i % first.row_count);
    const uint32_t head = first.kv_head * group + static_cast<uint32_t>(i / first.row_count);
    const size_t at = size_t{row} * shape.head_count + head;
    float* target = out + at * dim;
    std::fill(target, target + dim, 0.0F);
    SoftmaxState state;
    for (uint32_t range = 0; range < range_count_; ++range) {
      const size_t one = items_[first_item + range].first_state + i;
      cpu::take_in(states_[one], &outputs_[one * dim], dim, state, target);
    }
    if (shape.prefix.output != nullptr) {
      const SoftmaxState divided = {shape.prefix.log_sum_exp[at], 1};
      cpu::take_in(divided, shape.prefix.output + at * dim, dim, state, target);
    }
    attention_rows().scale(target, 1.0F / state.sum, dim, target);
  }
}

void Attention::run(const AttentionShape& shape, const float* q, const KvCache& cache,
                    uint32_t layer, float* out) {
  plan(shape, cache);
  const auto item_count = static_cast<int64_t>(items_.size());
#pragma omp parallel num_threads(static_cast <int>(shape.thread_count))
  {
    const BlasScope scope;
    Buffers& buffers = buffers_[static_cast<size_t>(omp_get_thread_num())];
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < item_count; ++i) {
      compute(shape, q, cache, layer, items_[static_cast<size_t>(i)], &buffers);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < item_count; i += range_count_) {
      join(shape, cache, static_cast<size_t>(i), out);
    }
  }
}

uint64_t Attention::scratch_bytes(const ModelConfig& config, uint32_t row_count,
                                  uint32_t thread_count) {
  const uint64_t tile_rows = std::min(row_count, kTileRows);
  const uint64_t stacked = tile_rows * config.group_size();
  const uint64_t tasks = uint64_t{divide_up(row_count, kTileRows)} * config.kv_head_count;
  const uint64_t items = tasks + uint64_t{kItemsPerThread} * thread_count;
  return sizeof(float) * (thread_count * stacked * (config.head_dim + kBlockKeys) +
                          items * stacked * (config.head_dim + 2));
}

}  // namespace polykv
