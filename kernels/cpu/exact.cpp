#include <cstring>

#include "kernels/codec_rules.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gains.h"
#include "kernels/cpu/tensors.h"
#include "kernels/reference/reference.h"

namespace polykv::cpu {

namespace {

uint64_t v_start(const LayerGeometry& geometry, Dtype dtype) {
  return kBlockTokens * geometry.k_head_dim * dtype_size_bytes(dtype);
}

/// All exponent bits set: an infinity or NaN.
bool any_not_finite(const void* elements, Dtype dtype, size_t count) {
  uint32_t found = 0;
  if (dtype == Dtype::f32) {
    const auto* bits = static_cast<const uint32_t*>(elements);
    for (size_t i = 0; i < count; ++i) found |= (bits[i] & 0x7f800000U) == 0x7f800000U ? 1U : 0U;
  } else {
    const uint16_t mask = dtype == Dtype::f16 ? 0x7c00U : 0x7f80U;
    const auto* bits = static_cast<const uint16_t*>(elements);
    for (size_t i = 0; i < count; ++i) found |= (bits[i] & mask) == mask ? 1U : 0U;
  }
  return found != 0;
}

bool same_layout(const Strides& strides, Dtype a, Dtype b) {
  return a == b && strides.dim == 1;
}

const uint8_t* element(const SourceTensor& source, uint32_t head, uint64_t token) {
  return static_cast<const uint8_t*>(source.data) +
         reference::element_index(source.strides, head, token, 0) *
             static_cast<int64_t>(dtype_size_bytes(source.dtype));
}

/// False when a value is not finite in the source dtype.
bool encode_tensor(const SourceTensor& source, const LayerSlot& slot, uint64_t start) {
  const Dtype dtype = slot.source_dtype;
  const size_t row_bytes = source.head_dim * dtype_size_bytes(dtype);
  BlockReader reader(source);
  for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
    for (uint64_t block = 0; block < slot.block_count; ++block) {
      uint8_t* out = slot.block(head, block) + start;
      const uint32_t count = block_rows(slot.token_count, block);
      if (same_layout(source.strides, source.dtype, dtype)) {
        for (uint32_t i = 0; i < count; ++i) {
          std::memcpy(out + i * row_bytes, element(source, head, block * kBlockTokens + i),
                      row_bytes);
        }
      } else {
        const Rows rows = reader.read(head, block * kBlockTokens, count);
        for (uint32_t i = 0; i < count; ++i) {
          store_row(dtype, rows.data + i * rows.stride, out + i * row_bytes, source.head_dim);
        }
      }
      if (any_not_finite(out, dtype, size_t{count} * source.head_dim)) return false;
    }
  }
  return true;
}

Status encode(const KvSource& source, LayerSlot& slot) {
  const LayerGeometry& geometry = slot.geometry;
  if (encode_tensor(source_k(source, geometry), slot, 0) &&
      encode_tensor(source_v(source, geometry), slot, v_start(geometry, slot.source_dtype))) {
    return Status::ok();
  }
  // The reference finds and names the value.
  return reference::exact_codec().encode(source, slot);
}

void copy_block(const LayerView& layer, const DecodeTarget& range, const TargetTensor& target,
                uint64_t start, uint32_t head, uint64_t block) {
  const size_t element_bytes = dtype_size_bytes(target.dtype);
  const size_t row_bytes = target.head_dim * element_bytes;
  const uint64_t low = std::max(range.first_token, block * kBlockTokens);
  const uint64_t high = std::min(range.first_token + range.token_count, (block + 1) * kBlockTokens);
  const uint8_t* rows = layer.block(head, block) + start;
  for (uint64_t token = low; token < high; ++token) {
    const int64_t index =
        reference::element_index(target.strides, head, token - range.first_token, 0);
    std::memcpy(static_cast<uint8_t*>(target.data) + index * static_cast<int64_t>(element_bytes),
                rows + token % kBlockTokens * row_bytes, row_bytes);
  }
}

void decode_tensor(const LayerView& layer, const DecodeTarget& range, const TargetTensor& target,
                   uint64_t start) {
  const Dtype dtype = layer.source_dtype;
  const size_t row_bytes = target.head_dim * dtype_size_bytes(dtype);
  const bool copies = same_layout(target.strides, target.dtype, dtype);
  BlockWriter writer(target, range.first_token, range.token_count);
  const uint64_t last = (range.first_token + range.token_count - 1) / kBlockTokens;
  for (uint32_t head = 0; head < layer.geometry.kv_head_count; ++head) {
    for (uint64_t block = range.first_token / kBlockTokens; block <= last; ++block) {
      if (copies) {
        copy_block(layer, range, target, start, head, block);
        continue;
      }
      const uint8_t* rows = layer.block(head, block) + start;
      writer.write(head, block, [&](float* out, int64_t stride) {
        for (uint32_t i = 0; i < kBlockTokens; ++i) {
          load_row(dtype, rows + i * row_bytes, out + i * stride, target.head_dim);
        }
      });
    }
  }
}

void decode(const LayerView& layer, const DecodeTarget& target) {
  const LayerGeometry& geometry = layer.geometry;
  if (target.k != nullptr) decode_tensor(layer, target, target_k(target, geometry), 0);
  if (target.v != nullptr) {
    decode_tensor(layer, target, target_v(target, geometry), v_start(geometry, layer.source_dtype));
  }
}

}  // namespace

const Codec& exact_codec() {
  static const Codec codec{Profile::exact,    false,  false, false, check_exact_geometry,
                           exact_block_bytes, encode, decode};
  return codec;
}

}  // namespace polykv::cpu
