// Tokens in front of a KV cache's own whose K and V live elsewhere, for example packed in the pool: attention to them is
// asked for and joined exactly with attention to the cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/result.h"

namespace polykv {

/// Rows of one layer; each sees all tokens of the prefix. Borrowed during the call.
struct PrefixQueries {
  uint32_t layer = 0;
  uint32_t row_count = 0;
  uint32_t head_count = 0;
  const float* q = nullptr;  // [row, head, head_dim] after RoPE, not scaled; heads are dense
  size_t q_stride = 0;       // floats between two rows
  uint32_t thread_count = 1;
};

class Prefix {
 public:
  virtual ~Prefix() = default;

  /// The cache's first token has this position. Not 0, and the same during a forward().
  virtual uint32_t token_count() const = 0;

  /// Softmax attention with logits q . k / sqrt(head_dim): outputs [row, head, head_dim], divided by the sums, and the
  /// logarithms of the sums of exp(logit), [row, head]; both dense and finite.
  virtual Status attend(const PrefixQueries& queries, float* output, float* log_sum_exp) const = 0;
};

}  // namespace polykv
