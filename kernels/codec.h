// The codecs: one table row per profile. Daemon and clients ask codec_for() and never switch on a
// profile; a new codec is a new row, there or in kernels/profiles.h.
//
// KV tensors are [token, kv_head, head_dim] with any strides; token 0 is the segment's first. A
// codec writes and reads the payload of one layer (include/internal/segment_format.h). Bytes moved
// per token and kv_head, K and V together, Dk = k_head_dim:
//   exact        (Dk + Dv) * size of the source dtype
//   paper-k8v3   Dk + 3/8 Dv + 2
//   k8v8, k6v5, k5v4, k8v3, k4v3: the bits of Dk and Dv codes / 8 + 4; kernels/profiles.h
//
// Everything here is thread-safe: codecs have no state, and different layers may be encoded and
// decoded at once.
#pragma once

#include <cstdint>
#include <span>

#include "common/result.h"
#include "include/internal/geometry.h"
#include "include/internal/segment_format.h"

namespace polykv {

/// Distances between neighbours, in elements (not bytes). May be negative.
struct Strides {
  int64_t head = 0;
  int64_t token = 0;
  int64_t dim = 1;
};

/// K and V of one layer as a producer has them: token_count tokens of the segment. Borrowed during
/// the call.
struct KvSource {
  Dtype dtype = Dtype::f32;  // of both
  const void* k = nullptr;   // [token, kv_head, k_head_dim] under k_strides
  Strides k_strides;
  const void* v = nullptr;  // [token, kv_head, v_head_dim] under v_strides
  Strides v_strides;
};

/// Where decoded K and V of tokens [first_token, first_token + token_count) of a segment go. Token
/// first_token lands at k and v themselves. A null k or v is left out. Only the addressed elements
/// are written. Values beyond the range of an f16 target become infinite, as in any conversion.
struct DecodeTarget {
  uint64_t first_token = 0;  // counted from the segment's first token
  uint64_t token_count = 0;
  Dtype dtype = Dtype::f32;
  void* k = nullptr;
  Strides k_strides;
  void* v = nullptr;
  Strides v_strides;
};

/// Scales of a layer, as the layer record holds them.
struct LayerScales {
  float k_scale = 0;
  int32_t k_gain_exponent = 0;
  int32_t v_gain_exponent = 0;
  int32_t exact_k_exponent = 0;
  int32_t exact_v_exponent = 0;
};

/// The payload of one layer, already validated against geometry and bounds. Non-owning.
template <typename Byte, typename F32, typename U32, typename U16>
struct BasicLayer {
  LayerGeometry geometry;
  Dtype source_dtype = Dtype::f32;
  Profile profile = Profile::any;
  uint64_t token_count = 0;
  uint64_t block_bytes = 0;
  uint64_t block_count = 0;  // of one kv_head
  uint32_t exact_row_capacity = 0;
  uint32_t exact_row_count = 0;
  LayerScales scales;
  F32* k_means = nullptr;       // [kv_head, k_head_dim]; null: not centred
  U32* exact_tokens = nullptr;  // [exact row]; counted from the segment's first token
  U16* exact_k = nullptr;       // fp16 [kv_head, exact_row_capacity, k_head_dim]
  U16* exact_v = nullptr;       // fp16 [kv_head, exact_row_capacity, v_head_dim]
  Byte* blocks = nullptr;       // [kv_head, block] of block_bytes

  Byte* block(uint32_t kv_head, uint64_t index) const {
    return blocks + (kv_head * block_count + index) * block_bytes;
  }
};
using LayerView = BasicLayer<const uint8_t, const float, const uint32_t, const uint16_t>;
/// What an encoder fills: all bytes are zero before; exact_tokens are in place; it writes the rest
/// and the scales.
using LayerSlot = BasicLayer<uint8_t, float, uint32_t, uint16_t>;

/// Which implementation runs. `cpu` picks the widest instruction set of this machine.
enum class Backend { reference, cpu };
/// `cpu`, or `reference` when the environment says POLYKV_CPU=reference. Read once.
Backend active_backend();

struct Codec {
  Profile profile;
  bool single_segment_only;  // a document of this profile is one segment that starts at token 0
  bool centres_k;            // has K means
  bool has_exact_rows;  // the document's first kFirstExactRows tokens, and those that a producer
                        // chose
  /// POLYKV_ERR_UNSUPPORTED, naming profile and values, when this codec cannot hold such a layer.
  /// `profile` is the codec's own, as for the next one.
  Status (*check_geometry)(Profile profile, const LayerGeometry& geometry);
  /// Bytes of a block of kBlockTokens tokens of one kv_head; a multiple of 64. Geometry was
  /// checked.
  uint64_t (*block_bytes)(Profile profile, const LayerGeometry& geometry, Dtype source_dtype);
  /// NaN, an infinity or a value that the codec cannot hold: POLYKV_ERR_INVALID_ARGUMENT naming K
  /// or V, token and kv_head.
  Status (*encode)(const KvSource& source, LayerSlot& slot);
  /// The range was checked. Never reads outside the layer's parts, whatever their bytes.
  void (*decode)(const LayerView& layer, const DecodeTarget& target);
};

/// The document's first tokens draw an outsized share of attention and are kept exact (except by
/// `exact` itself and paper-k8v3). So many of them lie at or behind `first_token`.
inline constexpr uint32_t kFirstExactRows = 4;
constexpr uint32_t first_exact_rows(uint64_t first_token) {
  return first_token < kFirstExactRows ? kFirstExactRows - static_cast<uint32_t>(first_token) : 0;
}

/// The lossy codecs refuse values beyond this: norms and decoded values then stay within fp32.
inline constexpr float kMaxMagnitude = 0x1p120F;

/// The codec of a profile, static storage; null when this build has none for it.
const Codec* codec_for(Profile profile, Backend backend = active_backend());
/// The same with an error that names the profile: POLYKV_ERR_UNSUPPORTED.
Result<const Codec*> require_codec(Profile profile, Backend backend = active_backend());

/// Whether a document of the profile can have such layers. `automatic` has no codec of its own: each
/// layer gets one that holds it. POLYKV_ERR_UNSUPPORTED.
Status check_profile(Profile profile, std::span<const LayerGeometry> layers);
/// Whether a document of the profile is one segment that starts at token 0.
bool is_single_segment(Profile profile);
/// Whether this build has the profile, and its documents may consist of several segments, which
/// others can share.
bool is_shareable(Profile profile);
/// All that are.
std::span<const Profile> shareable_profiles();

}  // namespace polykv
