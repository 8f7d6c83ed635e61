// `exact`: K and V in the source dtype, rows of a block one after the other. Values of another
// dtype are converted, rounded to nearest even.
#include <cmath>

#include "kernels/codec_rules.h"
#include "kernels/reference/elements.h"
#include "kernels/reference/reference.h"

namespace polykv::reference {

namespace {

Status encode_tensor(const SourceTensor& source, LayerSlot& slot, uint64_t start) {
  for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
    for (uint64_t token = 0; token < slot.token_count; ++token) {
      uint8_t* rows = slot.block(head, token / kBlockTokens) + start;
      for (uint32_t dim = 0; dim < source.head_dim; ++dim) {
        const auto index = static_cast<int64_t>(token % kBlockTokens * source.head_dim + dim);
        const float value = source.at(head, token, dim);
        store_element(rows, slot.source_dtype, index, value);
        if (!std::isfinite(load_element(rows, slot.source_dtype, index))) {
          return bad_value(
              source.is_k, token, head, value,
              format("values must be finite in %s", dtype_name(slot.source_dtype)).c_str());
        }
      }
    }
  }
  return Status::ok();
}

uint64_t v_start(const LayerGeometry& geometry, Dtype dtype) {
  return kBlockTokens * geometry.k_head_dim * dtype_size_bytes(dtype);
}

Status encode(const KvSource& source, LayerSlot& slot) {
  POLYKV_RETURN_IF_ERROR(encode_tensor(source_k(source, slot.geometry), slot, 0));
  return encode_tensor(source_v(source, slot.geometry), slot,
                       v_start(slot.geometry, slot.source_dtype));
}

void decode_tensor(const LayerView& layer, const DecodeTarget& range, const TargetTensor& target,
                   uint64_t start) {
  for (uint32_t head = 0; head < layer.geometry.kv_head_count; ++head) {
    for (uint64_t i = 0; i < range.token_count; ++i) {
      const uint64_t token = range.first_token + i;
      const uint8_t* rows = layer.block(head, token / kBlockTokens) + start;
      for (uint32_t dim = 0; dim < target.head_dim; ++dim) {
        const auto index = static_cast<int64_t>(token % kBlockTokens * target.head_dim + dim);
        target.put(head, i, dim, load_element(rows, layer.source_dtype, index));
      }
    }
  }
}

void decode(const LayerView& layer, const DecodeTarget& target) {
  if (target.k != nullptr) decode_tensor(layer, target, target_k(target, layer.geometry), 0);
  if (target.v != nullptr) {
    decode_tensor(layer, target, target_v(target, layer.geometry),
                  v_start(layer.geometry, layer.source_dtype));
  }
}

}  // namespace

const Codec& exact_codec() {
  static const Codec codec{Profile::exact,    false,  false, false, check_exact_geometry,
                           exact_block_bytes, encode, decode};
  return codec;
}

}  // namespace polykv::reference
