#include "kernels/codec_rules.h"

#include <bit>

#include "kernels/block_layout.h"

namespace polykv {

namespace {

// K8 holds dims in fours.
Status check_k8(const char* profile, const LayerGeometry& geometry) {
  if (geometry.k_head_dim % 4 == 0) return Status::ok();
  return {POLYKV_ERR_UNSUPPORTED,
          format("%s needs a K head_dim that is a multiple of 4, not %u; use exact", profile,
                 geometry.k_head_dim)};
}

}  // namespace

Status check_exact_geometry(const LayerGeometry& geometry) {
  static_cast<void>(geometry);
  return Status::ok();
}

Status check_k8v8_geometry(const LayerGeometry& geometry) {
  return check_k8("k8v8", geometry);
}

Status check_paper_geometry(const LayerGeometry& geometry) {
  POLYKV_RETURN_IF_ERROR(check_k8("paper-k8v3", geometry));
  if (std::has_single_bit(geometry.v_head_dim) && geometry.v_head_dim >= 8) return Status::ok();
  return {POLYKV_ERR_UNSUPPORTED, format("paper-k8v3 rotates V by a Walsh-Hadamard transform, "
                                         "whose head_dim is a power of two from 8 "
                                         "on, not %u; use k8v8",
                                         geometry.v_head_dim)};
}

uint64_t exact_block_bytes(const LayerGeometry& geometry, Dtype source_dtype) {
  return kBlockTokens * dtype_size_bytes(source_dtype) *
         (uint64_t{geometry.k_head_dim} + geometry.v_head_dim);
}

uint64_t k8v8_block_bytes(const LayerGeometry& geometry, Dtype) {
  return K8V8Block::bytes(geometry);
}

uint64_t paper_block_bytes(const LayerGeometry& geometry, Dtype) {
  return PaperBlock::bytes(geometry);
}

Status bad_value(bool is_k, uint64_t token, uint32_t kv_head, double value, const char* rule) {
  return {POLYKV_ERR_INVALID_ARGUMENT,
          format("%s of token %llu, kv_head %u is %g; %s", is_k ? "K" : "V",
                 static_cast<unsigned long long>(token), kv_head, value, rule)};
}

}  // namespace polykv
