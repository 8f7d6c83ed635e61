// From a layer record to pointers. Internal to kernels/.
#pragma once

#include <cstdint>

#include "kernels/codec.h"

namespace polykv {

inline bool is_aligned(const uint8_t* bytes) {
  return reinterpret_cast<uintptr_t>(bytes) % kSegmentAlignBytes == 0;
}

/// Layer: LayerView over const bytes, or LayerSlot. The record was planned or validated.
template <typename Layer, typename Byte>
Layer layer_parts(const SegmentHeader& header, const LayerRecord& record, Byte* bytes) {
  Layer layer;
  layer.geometry = {record.kv_head_count, record.k_head_dim, record.v_head_dim,
                    record.sliding_window};
  layer.source_dtype = static_cast<Dtype>(header.source_dtype);
  layer.profile = static_cast<Profile>(record.profile);
  layer.token_count = header.token_count;
  layer.block_bytes = record.block_bytes;
  layer.block_count = record.block_count;
  layer.exact_row_capacity = record.exact_row_capacity;
  layer.exact_row_count = record.exact_row_count;
  layer.scales = {record.k_scale, record.k_gain_exponent, record.v_gain_exponent,
                  record.exact_k_exponent, record.exact_v_exponent};
  const auto part = [&](auto*& pointer, uint64_t offset, uint64_t size_bytes) {
    if (size_bytes == 0) return;
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(bytes + offset);
  };
  part(layer.k_means, record.k_means_offset, record.k_means_bytes);
  part(layer.exact_tokens, record.exact_tokens_offset, record.exact_tokens_bytes);
  part(layer.exact_k, record.exact_k_offset, record.exact_k_bytes);
  part(layer.exact_v, record.exact_v_offset, record.exact_v_bytes);
  part(layer.blocks, record.blocks_offset, record.blocks_bytes);
  return layer;
}

}  // namespace polykv
