// Attention of query rows to the packed tokens of one layer: streaming softmax over a block or a few at a time, so that
// nothing of the document's size is held, and partial results that join exactly (FlashAttention's online softmax,
// arXiv 2205.14135). Quantised profiles are read as they are where the machine has instructions for it
// (kernels/cpu/attend_packed.h), everything else is decoded as it goes.
//
// Logits are those of the keys as they were before centring, exact rows included, in every segment: partial results of
// different segments, and of the caller's own suffix, are in one frame.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/result.h"
#include "kernels/codec.h"
#include "kernels/cpu/attend_ops.h"
#include "kernels/cpu/attention_rows.h"

namespace polykv {

/// Query rows of all heads. Head h reads kv_head h / (head_count / kv_head_count). Borrowed.
struct AttendQueries {
  uint32_t head_count = 0;
  uint32_t row_count = 0;
  const float* q = nullptr;  // [head, row, k_head_dim], times the logits' scale; finite
  float soft_cap = 0;        // logits become cap * tanh(logit / cap); 0: they stay
  /// [row]: the first token of the document that the row sees; null: all of them.
  const uint64_t* first_tokens = nullptr;
};

/// What the rows of one kv_head's heads have seen so far, [head of the group, row].
struct AttendPart {
  AttendPart(uint32_t rows, uint32_t v_head_dim)
      : states(rows), outputs(size_t{rows} * v_head_dim) {}
  std::vector<SoftmaxState> states;
  std::vector<float> outputs;  // [row, v_head_dim], the weighted sum of values; not divided yet
};

/// Memory of one thread, reused between calls.
struct AttendScratch {
  std::vector<float> k;
  std::vector<float> v;
  std::vector<float> scores;
  std::vector<size_t> skipped;
  // Of attention to packed blocks, [head of the group, row]:
  std::vector<cpu::PackedQuery> queries;
  std::vector<int32_t> words;
  std::vector<SoftmaxState> states;
  std::vector<float> outputs;
};

/// Takes tokens [first_token, first_token + token_count) of a segment into `part`. The range was
/// checked. False: a logit is beyond fp32, and `part` is of no use. `document_token`: which token of the document the segment's first is.
[[nodiscard]] bool attend_tokens(const Codec& codec, const LayerView& layer, uint32_t kv_head,
                                 uint64_t document_token, uint64_t first_token,
                                 uint64_t token_count, const AttendQueries& queries,
                                 AttendPart& part, AttendScratch& scratch);

/// Softmax over everything that the parts have seen, of one row: `output` is overwritten, zeros
/// where no part saw a token. Returns the log-sum-exp of the logits (minus infinity then).
float join_parts(std::span<const AttendPart> parts, uint32_t row, uint32_t v_head_dim,
                 float* output);

/// One result of attention over some tokens, for a number of rows: normalised outputs and the
/// logarithms of their sums.
struct AttentionResult {
  const void* output = nullptr;        // [row, v_head_dim] of the dtype
  const float* log_sum_exp = nullptr;  // [row]; minus infinity: no tokens
};

/// Joins results over different tokens into the result over all of them. `output` and
/// `log_sum_exp` (may be null) may be those of one of the results. POLYKV_ERR_INVALID_ARGUMENT, with
/// nothing written: a log-sum-exp that is plus infinity or no number.
Status merge_attention(std::span<const AttentionResult> results, uint64_t row_count,
                       uint32_t v_head_dim, Dtype dtype, void* output, float* log_sum_exp);

}  // namespace polykv
