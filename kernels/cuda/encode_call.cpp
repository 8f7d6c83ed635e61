#include "kernels/cuda/encode_call.h"

#include <limits>

#include "kernels/codec_rules.h"
#include "kernels/cuda/encode_arguments.h"
#include "kernels/cuda/launch_rules.h"

namespace polykv::cuda {

Status encode_status(const EncodeOutcome& outcome, Profile profile, Dtype stored_dtype) {
  for (uint32_t i = 0; i < 2; ++i) {
    const auto& bad = outcome.bad[i];
    if (bad.token == kNoBadToken) continue;
    const std::string rule = profile == Profile::exact
                                 ? format("values must be finite in %s", dtype_name(stored_dtype))
                                 : std::string(kLossyRule);
    return bad_value(i == 0, bad.token, bad.kv_head, static_cast<double>(bad.value), rule.c_str());
  }
  return Status::ok();
}

uint64_t encode_workspace_bytes(const LayerSlot& slot) {
  const uint64_t places = slot.geometry.kv_head_count * slot.block_count;
  return places * slot.geometry.k_head_dim * sizeof(double) +
         2 * places * (kBlockTokens * sizeof(float) + sizeof(float) + sizeof(BadValue)) + 4 * 256;
}

Status check_encode(const KvSource& source, const LayerSlot& slot) {
  constexpr char kEncode[] = "encode";
  POLYKV_RETURN_IF_ERROR(check_layer_shape(kEncode, slot.profile, slot.geometry));
  POLYKV_RETURN_IF_ERROR(check_dtype(kEncode, source.dtype));
  POLYKV_RETURN_IF_ERROR(check_aligned(kEncode, "K", source.k, source.dtype));
  POLYKV_RETURN_IF_ERROR(check_aligned(kEncode, "V", source.v, source.dtype));
  if (source.k == nullptr || source.v == nullptr || slot.blocks == nullptr) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "encode on the device: K, V or the layer's blocks are null"};
  }
  if (slot.exact_row_count > slot.exact_row_capacity || slot.exact_row_count > slot.token_count) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("encode on the device: %u exact rows of %llu tokens, and room for %u",
                   slot.exact_row_count, static_cast<unsigned long long>(slot.token_count),
                   slot.exact_row_capacity)};
  }
  return check_grid(kEncode, 2 * slot.geometry.kv_head_count * slot.block_count);
}

}  // namespace polykv::cuda
