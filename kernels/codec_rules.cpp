#include "kernels/codec_rules.h"

#include <bit>

#include "kernels/block_layout.h"
#include "kernels/codebooks.h"

namespace polykv {

namespace {

// K8 holds dims in fours.
Status check_k8(Profile profile, const LayerGeometry& geometry) {
  if (geometry.k_head_dim % 4 == 0) return Status::ok();
  return {POLYKV_ERR_UNSUPPORTED,
          format("%s needs a K head_dim that is a multiple of 4, not %u; use exact",
                 profile_name(profile), geometry.k_head_dim)};
}

Status check_rotated(Profile profile, const char* tensor, uint32_t head_dim) {
  if (head_dim % kRotationDims == 0) return Status::ok();
  return {POLYKV_ERR_UNSUPPORTED, format("%s rotates %s, whose head_dim is a multiple of %u then, "
                                         "not %u; use exact, or k8v8 where that is a multiple of 4",
                                         profile_name(profile), tensor, kRotationDims, head_dim)};
}

Status check_quantized_geometry(Profile profile, const LayerGeometry& geometry) {
  const ProfileRule& rule = *profile_rule(profile);
  if (rule.k.rotated) {
    POLYKV_RETURN_IF_ERROR(check_rotated(profile, "K", geometry.k_head_dim));
  } else {
    POLYKV_RETURN_IF_ERROR(check_k8(profile, geometry));
  }
  return rule.v.rotated ? check_rotated(profile, "V", geometry.v_head_dim) : Status::ok();
}

uint64_t quantized_block_bytes(Profile profile, const LayerGeometry& geometry, Dtype) {
  return QuantizedBlock::bytes(*profile_rule(profile), geometry);
}

}  // namespace

Status check_exact_geometry(Profile, const LayerGeometry&) {
  return Status::ok();
}

Status check_paper_geometry(Profile profile, const LayerGeometry& geometry) {
  POLYKV_RETURN_IF_ERROR(check_k8(profile, geometry));
  if (std::has_single_bit(geometry.v_head_dim) && geometry.v_head_dim >= 8) return Status::ok();
  return {POLYKV_ERR_UNSUPPORTED, format("paper-k8v3 rotates V by a Walsh-Hadamard transform, "
                                         "whose head_dim is a power of two from 8 "
                                         "on, not %u; use k8v8",
                                         geometry.v_head_dim)};
}

uint64_t exact_block_bytes(Profile, const LayerGeometry& geometry, Dtype source_dtype) {
  return kBlockTokens * dtype_size_bytes(source_dtype) *
         (uint64_t{geometry.k_head_dim} + geometry.v_head_dim);
}

uint64_t paper_block_bytes(Profile, const LayerGeometry& geometry, Dtype) {
  return PaperBlock::bytes(geometry);
}

std::vector<Codec> quantized_codecs(decltype(Codec::encode) encode,
                                    decltype(Codec::decode) decode) {
  std::vector<Codec> codecs;
  for (const ProfileRule& rule : kProfileRules) {
    codecs.push_back({rule.profile, false, true, true, check_quantized_geometry,
                      quantized_block_bytes, encode, decode});
  }
  return codecs;
}

const Codec* find_codec(const std::vector<Codec>& codecs, Profile profile) {
  for (const Codec& codec : codecs) {
    if (codec.profile == profile) return &codec;
  }
  return nullptr;
}

Status bad_value(bool is_k, uint64_t token, uint32_t kv_head, double value, const char* rule) {
  return {POLYKV_ERR_INVALID_ARGUMENT,
          format("%s of token %llu, kv_head %u is %g; %s", is_k ? "K" : "V",
                 static_cast<unsigned long long>(token), kv_head, value, rule)};
}

}  // namespace polykv
