/**
 * polykv: attention to a document in place. Included by polykv.h; see there for errors and threads.
 *
 * A program computes attention to the document here and attention to its own suffix itself, and joins the two exactly
 * with polykv_attention_merge (online softmax, arXiv 2205.14135): it needs no cache of its own for the document.
 */
#ifndef POLYKV_ATTEND_H
#define POLYKV_ATTEND_H

#include "polykv/polykv.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Distances along the axes of queries and outputs, in elements. All 0: dense [query, head, dim]. */
typedef struct polykv_query_strides {
  int64_t query;
  int64_t head;
  int64_t dim;
} polykv_query_strides;

typedef struct polykv_attend_options {
  size_t struct_size;
  uint64_t first_token; /* of the document: tokens [first_token, first_token + token_count) */
  uint64_t token_count;
  uint32_t query_count; /* rows, for example 1 in a decode step */
  uint32_t
      head_count; /* a multiple of kv_head_count; head h reads kv_head h / (head_count / kv_head_count) */
  polykv_dtype query_dtype;
  const void* q; /* element of (query 0, head 0, dim 0); positions already applied (RoPE) */
  polykv_query_strides q_strides;
  float scale;    /* of the logits; 0: 1 / sqrt(k_head_dim) */
  float soft_cap; /* logits become soft_cap * tanh(logit / soft_cap); 0: they stay */
  /** [query_count] or NULL: the first token of the document that each row sees, for sliding windows. The layer's
      sliding_window is not applied by itself: only the caller knows where the rows stand. */
  const uint64_t* query_first_tokens;
  polykv_dtype output_dtype;
  void* output; /* [query, head, v_head_dim] under output_strides */
  polykv_query_strides output_strides;
  float*
      log_sum_exp; /* [query_count, head_count] or NULL: the logarithm of the sum of exp(logit) */
  uint32_t thread_count; /* 0 and 1: the calling thread alone */
} polykv_attend_options;
POLYKV_API void polykv_attend_options_init(polykv_attend_options* options);

/**
 * Softmax attention of query rows to a token range of one layer, over as many segments as there are, in the packed
 * form: no memory of the document's size. A row that sees no token gets zeros and a log-sum-exp of minus infinity (all
 * rows do when token_count is 0). Values beyond fp16's range become infinite when output_dtype is f16. Equal calls with
 * an equal thread_count give equal bits. Several threads may call it at once. Errors: INVALID_ARGUMENT (layer, range,
 * head_count, more than 2^24 rows, a query that is no finite number, logits or weighted sums of values beyond fp32),
 * BUSY (tokens that are not sealed yet).
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_layer_attend(const polykv_lease* lease,
                                                              uint32_t layer,
                                                              const polykv_attend_options* options);

/** Attention over some tokens: what polykv_layer_attend gives, or what the caller computed over its own. */
typedef struct polykv_attention_result {
  const void* output;       /* dense [row, v_head_dim]; divided by the sum, as attention is */
  const float* log_sum_exp; /* [row]; minus infinity: no tokens, and the row's output is not used */
} polykv_attention_result;

/**
 * Joins results over different tokens into that over all of them. A row is one query of one head; row_count is their
 * number. `output` and `log_sum_exp` (NULL: not wanted) may be those of one of the results. All outputs are of `dtype`.
 * INVALID_ARGUMENT: no result, a NULL in one, a log_sum_exp that is plus infinity or no number.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_attention_merge(
    const polykv_attention_result* results, size_t result_count, uint64_t row_count,
    uint32_t v_head_dim, polykv_dtype dtype, void* output, float* log_sum_exp);

#ifdef __cplusplus
}
#endif

/* Here and not in polykv.h: it needs polykv_query_strides, whichever header comes first. */
#include "polykv/certificate.h"

#endif
