#include <cmath>

#include "kernels/attend.h"
#include "libclient/attend.h"
#include "libclient/c_api.h"

using namespace polykv;
using namespace polykv::lib;

void polykv_attend_options_init(polykv_attend_options* options) {
  if (init(options) == nullptr) return;
  options->query_count = 1;
  options->query_dtype = POLYKV_F32;
  options->output_dtype = POLYKV_F32;
}

polykv_status polykv_layer_attend(const polykv_lease* lease, uint32_t layer,
                                  const polykv_attend_options* options) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "attend"));
    POLYKV_ASSIGN_OR_RETURN(const AttendRequest request, from_c(options));
    return attend(*lease->lease, layer, request);
  });
}

polykv_status polykv_attention_merge(const polykv_attention_result* results, size_t result_count,
                                     uint64_t row_count, uint32_t v_head_dim, polykv_dtype dtype,
                                     void* output, float* log_sum_exp) {
  return guarded([&]() -> Status {
    constexpr const char* kOperation = "merge attention";
    POLYKV_RETURN_IF_ERROR(require(results, kOperation, "results"));
    POLYKV_RETURN_IF_ERROR(require(output, kOperation, "output"));
    POLYKV_ASSIGN_OR_RETURN(const Dtype type, dtype_from_c(dtype));
    std::vector<AttentionResult> all;
    for (size_t i = 0; i < result_count; ++i) {
      POLYKV_RETURN_IF_ERROR(require(results[i].output, kOperation, "a result's output"));
      POLYKV_RETURN_IF_ERROR(require(results[i].log_sum_exp, kOperation, "a result's log_sum_exp"));
      all.push_back({results[i].output, results[i].log_sum_exp});
    }
    if (v_head_dim == 0 || v_head_dim > kMaxHeadDim) {
      return {POLYKV_ERR_INVALID_ARGUMENT,
              format("%s: v_head_dim %u; 1 to %u", kOperation, v_head_dim, kMaxHeadDim)};
    }
    if (all.empty())
      return {POLYKV_ERR_INVALID_ARGUMENT, format("%s: result_count is 0", kOperation)};
    return merge_attention(all, row_count, v_head_dim, type, output, log_sum_exp);
  });
}
