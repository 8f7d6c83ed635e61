/**
 * polykv: how good an encoding is. Included by polykv.h; see there for errors and threads.
 *
 * A producer that has the queries of a segment's last tokens can have each layer examined before the segment is
 * begun: the attention of these queries with the K and V as they are is compared with that with the K and V as readers
 * will find them. The relative error is the layer's certificate and is stored with it; tokens that draw much of the
 * attention are kept exact; and with POLYKV_PROFILE_AUTO a layer whose error is over a threshold gets a richer profile.
 */
#ifndef POLYKV_CERTIFICATE_H
#define POLYKV_CERTIFICATE_H

#include "polykv/polykv.h"

#ifdef __cplusplus
extern "C" {
#endif

/** How one layer of a document is stored, over all of its sealed segments. */
typedef struct polykv_layer_quality {
  uint32_t profiles;    /* bit p is set where a segment has the layer in profile p */
  uint32_t query_count; /* queries that the certificate below was measured with; 0: there is none */
  float relative_error; /* norm(output - exact output) / norm(exact output); of the worst segment */
} polykv_layer_quality;

/** Queries of one layer, of the segment's last query_count tokens, in their order. */
typedef struct polykv_layer_queries {
  size_t struct_size;
  uint32_t query_count; /* 1 to 1024, and no more than the segment has tokens; 16 are enough */
  uint32_t
      head_count; /* a multiple of kv_head_count; head h reads kv_head h / (head_count / kv_head_count) */
  polykv_dtype dtype;
  const void* q; /* element of (query 0, head 0, dim 0); positions already applied (RoPE) */
  polykv_query_strides strides;
  float scale;    /* of the logits; 0: 1 / sqrt(k_head_dim) */
  float soft_cap; /* logits become soft_cap * tanh(logit / soft_cap); 0: they stay */
} polykv_layer_queries;
POLYKV_API void polykv_layer_queries_init(polykv_layer_queries* queries);

/**
 * Examines one layer of the next segment, which polykv_segment_begin is then called for with the same token_count; for
 * all layers or for none, and for all with POLYKV_PROFILE_AUTO. A layer may be examined again. Query i of n sees the
 * segment's tokens up to its own, inside the layer's sliding_window. polykv_segment_encode_layer has to get the same K
 * and V afterwards. Takes memory for the encoded layer, and about the time of encoding it a few times. Different layers
 * may be examined by several threads at once. Errors: INVALID_ARGUMENT (layer, token_count, shapes, NaN and
 * infinities, logits beyond fp32); UNSUPPORTED (a geometry that the profile cannot hold).
 */
POLYKV_API POLYKV_NODISCARD polykv_status
polykv_publisher_examine_layer(polykv_publisher* publisher, uint64_t token_count, uint32_t layer,
                               const polykv_kv_source* source, const polykv_layer_queries* queries);

#ifdef __cplusplus
}
#endif

#endif
