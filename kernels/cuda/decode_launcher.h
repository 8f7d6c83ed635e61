// Plans and queues the decoding of a layer. Launcher: the device's (kernels/cuda/device_launcher.cuh) or
// the emulation's; both run the same kernels with the same arguments and shapes.
#pragma once

#include "kernels/cuda/decode_kernel.h"
#include "kernels/cuda/launch_rules.h"

namespace polykv::cuda {

namespace decode_detail {

inline DecodeRange range_of(const DecodeTarget& target, bool is_k) {
  DecodeRange range{};
  range.data = is_k ? target.k : target.v;
  range.dtype = target.dtype;
  range.strides = is_k ? target.k_strides : target.v_strides;
  range.first_token = target.first_token;
  range.token_count = target.token_count;
  range.first_block = target.first_token / kBlockTokens;
  range.block_count =
      (target.first_token + target.token_count - 1) / kBlockTokens - range.first_block + 1;
  return range;
}

/// paper-k8v3: K's levels are codes times one scale; V's table of levels is the codes themselves.
inline DecodeArguments paper_arguments(const LayerView& layer, bool is_k) {
  const LayerGeometry& geometry = layer.geometry;
  DecodeArguments arguments{};
  PackedTensor& tensor = arguments.tensor;
  tensor.blocks = layer.blocks;
  tensor.block_bytes = layer.block_bytes;
  tensor.block_count = layer.block_count;
  tensor.is_k = is_k;
  tensor.is_rotated = !is_k;
  tensor.bits = is_k ? 8 : 3;
  tensor.head_dim = is_k ? geometry.k_head_dim : geometry.v_head_dim;
  tensor.codes = static_cast<uint32_t>(is_k ? PaperBlock::k_codes : PaperBlock::v_codes(geometry));
  tensor.gains = is_k ? kNoGains : static_cast<uint32_t>(PaperBlock::v_norms);
  tensor.gain_unit = is_k ? layer.scales.k_scale : std::ldexp(1.0F, layer.scales.v_gain_exponent);
  for (uint32_t code = 0; code < 8 && !is_k; ++code) {
    tensor.levels.words[code / 4] |= code << (8 * (code % 4));
    arguments.real_levels[code] = paper_level(code, tensor.head_dim);
  }
  return arguments;
}

template <typename Launcher>
void decode_tensor(Launcher& launcher, const LayerView& layer, const DecodeTarget& target,
                   bool is_k) {
  const LayerGeometry& geometry = layer.geometry;
  const DecodeRange range = range_of(target, is_k);
  const uint64_t blocks = geometry.kv_head_count * range.block_count;
  if (layer.profile == Profile::exact) {
    const uint64_t k_bytes =
        kBlockTokens * geometry.k_head_dim * dtype_size_bytes(layer.source_dtype);
    launcher.template launch<CopyRowsKernel>(
        blocks, {layer.blocks, layer.block_bytes, layer.block_count, is_k ? 0 : k_bytes,
                 layer.source_dtype, is_k ? geometry.k_head_dim : geometry.v_head_dim, range});
  } else if (const ProfileRule* rule = profile_rule(layer.profile)) {
    const TensorPart part = is_k ? k_part(*rule, geometry) : v_part(*rule, geometry);
    launcher.template launch<DecodeKernel<int16_t>>(
        blocks, {packed_tensor(layer, part), exact_rows(layer, is_k), range, {}});
  } else {
    DecodeArguments arguments = paper_arguments(layer, is_k);
    arguments.range = range;
    if (is_k) {
      launcher.template launch<DecodeKernel<int16_t>>(blocks, arguments);
    } else {
      launcher.template launch<DecodeKernel<float>>(blocks, arguments);
    }
  }
}

}  // namespace decode_detail

template <typename Launcher>
Status decode_with(Launcher& launcher, const LayerView& layer, const DecodeTarget& target) {
  constexpr char kDecode[] = "decode";
  const LayerGeometry& geometry = layer.geometry;
  POLYKV_RETURN_IF_ERROR(check_layer_shape(kDecode, layer.profile, geometry));
  POLYKV_RETURN_IF_ERROR(
      check_token_range(kDecode, target.first_token, target.token_count, layer.token_count));
  POLYKV_RETURN_IF_ERROR(check_dtype(kDecode, target.dtype));
  POLYKV_RETURN_IF_ERROR(check_aligned(kDecode, "K", target.k, target.dtype));
  POLYKV_RETURN_IF_ERROR(check_aligned(kDecode, "V", target.v, target.dtype));
  POLYKV_RETURN_IF_ERROR(check_grid(kDecode, geometry.kv_head_count * layer.block_count));
  if (target.token_count == 0) return Status::ok();
  if (target.k != nullptr) decode_detail::decode_tensor(launcher, layer, target, true);
  if (target.v != nullptr) decode_detail::decode_tensor(launcher, layer, target, false);
  return launcher.status();
}

}  // namespace polykv::cuda
