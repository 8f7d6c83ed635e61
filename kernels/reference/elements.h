// One element of a strided tensor at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/codec.h"
#include "kernels/half.h"

namespace polykv::reference {

inline int64_t element_index(const Strides& strides, uint32_t head, uint64_t token, uint32_t dim) {
  return strides.head * head + strides.token * static_cast<int64_t>(token) + strides.dim * dim;
}

inline float load_element(const void* data, Dtype dtype, int64_t index) {
  if (dtype == Dtype::f32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == Dtype::f16 ? f32_from_f16(bits) : f32_from_bf16(bits);
}

inline void store_element(void* data, Dtype dtype, int64_t index, float value) {
  if (dtype == Dtype::f32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] =
        dtype == Dtype::f16 ? f16_from_f32(value) : bf16_from_f32(value);
  }
}

/// K or V of a source.
struct SourceTensor {
  const void* data;
  Dtype dtype;
  Strides strides;
  uint32_t head_dim;
  bool is_k;

  float at(uint32_t head, uint64_t token, uint32_t dim) const {
    return load_element(data, dtype, element_index(strides, head, token, dim));
  }
};
inline SourceTensor source_k(const KvSource& s, const LayerGeometry& g) {
  return {s.k, s.dtype, s.k_strides, g.k_head_dim, true};
}
inline SourceTensor source_v(const KvSource& s, const LayerGeometry& g) {
  return {s.v, s.dtype, s.v_strides, g.v_head_dim, false};
}

/// K or V of a target; tokens count from the target's first.
struct TargetTensor {
  void* data;
  Dtype dtype;
  Strides strides;
  uint32_t head_dim;

  void put(uint32_t head, uint64_t token, uint32_t dim, float value) const {
    store_element(data, dtype, element_index(strides, head, token, dim), value);
  }
};
inline TargetTensor target_k(const DecodeTarget& t, const LayerGeometry& g) {
  return {t.k, t.dtype, t.k_strides, g.k_head_dim};
}
inline TargetTensor target_v(const DecodeTarget& t, const LayerGeometry& g) {
  return {t.v, t.dtype, t.v_strides, g.v_head_dim};
}

/// Every value finite and at most kMaxMagnitude.
Status check_values(const SourceTensor& source, uint32_t head_count, uint64_t token_count);

/// Exact rows of K or V: fills rows [kv_head, capacity, head_dim] and gives their exponent.
int32_t encode_exact_rows(const SourceTensor& source, const LayerSlot& slot, uint16_t* rows);
/// Overwrites the decoded values of exact tokens inside the target's range.
void decode_exact_rows(const LayerView& layer, const uint16_t* rows, int32_t exponent,
                       const DecodeTarget& range, const TargetTensor& target);

}  // namespace polykv::reference
