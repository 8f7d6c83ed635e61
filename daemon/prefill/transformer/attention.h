// Causal attention of a run of queries over one layer of a KV cache, in fp32.
//
// Work is cut into items of (kv_head, up to 64 query rows, a range of keys). An item stacks the
// rows of the query heads that share its kv_head into one matrix and walks its keys in blocks with
// a running softmax: two matrix products per block. Only when there are few queries are keys cut
// into several ranges, so that every thread has work. At the end the ranges of one query are merged
// by their maxima and sums. Nothing is larger than rows x group x block.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/prefill/transformer/kv_cache.h"
#include "kernels/cpu/attention_rows.h"

namespace polykv {

/// What the same queries got from tokens in front of the cache's (daemon/prefill/transformer/prefix.h).
struct PrefixAttention {
  const float* output = nullptr;       // [row, head, head_dim]; null: there is no prefix
  const float* log_sum_exp = nullptr;  // [row, head]
};

struct AttentionShape {
  uint32_t head_count = 0;
  uint32_t row_count = 0;  // queries
  uint32_t first_key =
      0;                // the first query's own; query i sees keys 0 .. first_key + i of the cache
  size_t q_stride = 0;  // floats between two queries' rows
  uint32_t thread_count = 1;
  PrefixAttention prefix;
};

/// Keeps its scratch memory between calls; one call at a time.
class Attention {
 public:
  /// q: [row, head, head_dim] after RoPE, rows q_stride apart. out: [row, head * head_dim], dense.
  /// The cache's memory holds the keys and values of all positions up to the last query's, whatever
  /// its token count says.
  void run(const AttentionShape& shape, const float* q, const KvCache& cache, uint32_t layer,
           float* out);

  /// What run() keeps at most.
  static uint64_t scratch_bytes(const ModelConfig& config, uint32_t row_count,
                                uint32_t thread_count);

 private:
  struct Item {
    uint32_t kv_head;
    uint32_t row_begin;
    uint32_t row_count;
    uint32_t key_begin;
    uint32_t key_end;
    size_t
        first_state;  // of its group * row_count states; its outputs are at first_state * head_dim
  };
  struct Buffers {
    std::vector<float> q;       // [group * rows, head_dim]
    std::vector<float> scores;  // [group * rows, block]
  };

  void plan(const AttentionShape& shape, const KvCache& cache);
  void compute(const AttentionShape& shape, const float* q, const KvCache& cache, uint32_t layer,
               const Item& item, Buffers* buffers);
  void join(const AttentionShape& shape, const KvCache& cache, size_t first_item, float* out);

  std::vector<Item> items_;  // the ranges of one (kv_head, tile) are neighbours
  uint32_t range_count_ = 1;
  std::vector<Buffers> buffers_;      // one per thread
  std::vector<SoftmaxState> states_;  // [item, group, row]
  std::vector<float> outputs_;        // [item, group, row, head_dim], not yet divided by the sum
};

}  // namespace polykv
