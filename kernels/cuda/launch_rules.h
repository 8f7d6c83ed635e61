// What every launch checks first. Pure; on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/result.h"
#include "kernels/codec.h"
#include "kernels/cuda/tensor_arguments.h"

namespace polykv::cuda {

inline constexpr uint64_t kMaxGridBlocks = 0x7fffffff;

inline Status check_layer_shape(const char* operation, Profile profile, const LayerGeometry& g) {
  const Codec* codec = codec_for(profile);
  if (codec == nullptr)
    return {POLYKV_ERR_UNSUPPORTED, format("%s on the device: no codec for profile %u", operation,
                                           static_cast<uint32_t>(profile))};
  POLYKV_RETURN_IF_ERROR(codec->check_geometry(profile, g).with_context(operation));
  if (profile == Profile::paper_k8v3 && g.v_head_dim < kPieceSize) {
    return {POLYKV_ERR_UNSUPPORTED,
            format("%s on the device: paper-k8v3 with a V head_dim of %u, and at least %u there; "
                   "use the document on the CPU",
                   operation, g.v_head_dim, kPieceSize)};
  }
  if (std::max(g.k_head_dim, g.v_head_dim) <= kMaxDeviceHeadDim) return Status::ok();
  return {POLYKV_ERR_UNSUPPORTED,
          format("%s on the device: head_dims of K and V are %u and %u, and at most %u there; use "
                 "the document on the CPU",
                 operation, g.k_head_dim, g.v_head_dim, kMaxDeviceHeadDim)};
}

inline Status check_token_range(const char* operation, uint64_t first, uint64_t count,
                                uint64_t token_count) {
  if (count <= token_count && first <= token_count - count) return Status::ok();
  return {
      POLYKV_ERR_INVALID_ARGUMENT,
      format("%s on the device: tokens %llu + %llu are not within the segment's %llu; ask for "
             "what it holds",
             operation, static_cast<unsigned long long>(first),
             static_cast<unsigned long long>(count), static_cast<unsigned long long>(token_count))};
}

inline Status check_dtype(const char* operation, Dtype dtype) {
  if (dtype_is_valid(static_cast<uint32_t>(dtype))) return Status::ok();
  return {POLYKV_ERR_INVALID_ARGUMENT, format("%s on the device: dtype %u is unknown; use f32, f16 "
                                              "or bf16",
                                              operation, static_cast<uint32_t>(dtype))};
}

/// A misaligned access ends the use of the device for the whole process: here it is refused.
inline Status check_aligned(const char* operation, const char* what, const void* pointer,
                            Dtype dtype) {
  const uint64_t size_bytes = dtype_size_bytes(dtype);
  if (reinterpret_cast<uintptr_t>(pointer) % size_bytes == 0) return Status::ok();
  return {POLYKV_ERR_INVALID_ARGUMENT,
          format("%s on the device: %s is not aligned to its %llu-byte elements", operation, what,
                 static_cast<unsigned long long>(size_bytes))};
}

inline Status check_grid(const char* operation, uint64_t block_count) {
  if (block_count <= kMaxGridBlocks) return Status::ok();
  return {POLYKV_ERR_LIMIT, format("%s on the device: %llu thread blocks, a grid has at most %llu; "
                                   "ask for fewer tokens at a time",
                                   operation, static_cast<unsigned long long>(block_count),
                                   static_cast<unsigned long long>(kMaxGridBlocks))};
}

}  // namespace polykv::cuda
