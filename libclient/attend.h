// Attention to a leased document, over its segments and with several threads.
#pragma once

#include "common/result.h"
#include "libclient/lease.h"

namespace polykv::lib {

/// polykv_attend_options; `token` of the strides is between query rows. Strides that are all 0 mean dense [query, head,
/// dim].
struct AttendRequest {
  uint64_t first_token = 0;
  uint64_t token_count = 0;
  uint32_t query_count = 0;
  uint32_t head_count = 0;
  Dtype query_dtype = Dtype::f32;
  const void* q = nullptr;
  Strides q_strides{0, 0, 0};
  float scale = 0;
  float soft_cap = 0;
  const uint64_t* first_tokens = nullptr;
  Dtype output_dtype = Dtype::f32;
  void* output = nullptr;
  Strides output_strides{0, 0, 0};
  float* log_sum_exp = nullptr;
  uint32_t thread_count = 1;
};

/// What attend() refuses before it looks at queries; the pointers are not followed.
Status check_attend_request(const Lease& lease, uint32_t layer, const AttendRequest& request);
float attend_scale(const AttendRequest& request, const LayerGeometry& geometry);

/// Thread-safe.
Status attend(const Lease& lease, uint32_t layer, const AttendRequest& request);

}  // namespace polykv::lib
