// What encoding does to a layer's attention, measured before a segment is reserved: the quality
// certificate, the tokens that are worth keeping exact, and with `auto` the profile.
//
// The judges are the last queries of the prefill chunk that completes the segment: the producer has
// them, and what comes next will ask alike. They attend to the segment's tokens, causally, once as
// the producer has them and once as a reader will find them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/codec.h"
#include "kernels/segment.h"

namespace polykv {

/// More rows change the certificate by less than segments of one text differ.
inline constexpr uint32_t kCertificateQueries = 16;
inline constexpr uint32_t kMaxCertificateQueries = 1024;

/// Rows that a layer may choose beyond the document's first four: one for 128 tokens, which is 2.6 %
/// of what 128 tokens take in k5v4, and at most 16.
constexpr uint32_t max_chosen_exact_rows(uint64_t token_count) {
  return static_cast<uint32_t>(token_count < 16 * 128 ? token_count / 128 : 16);
}

/// Profiles that a layer of an `auto` document is given: the first whose certificate is within the
/// threshold, or the last. Those that cannot hold the layer's geometry are left out.
inline constexpr Profile kAutoLadder[] = {Profile::k5v4, Profile::k6v5, Profile::k8v8,
                                          Profile::exact};
/// Fixed where every layer of SmolLM2-135M on WikiText-2 passes with k5v4 (docs/benchmarks.md).
inline constexpr float kCertificateThreshold = 0.1F;

/// Query rows after RoPE, [row, head, k_head_dim] under the strides (`token` is the row's). Row i of
/// n is that of the segment's token token_count - n + i and sees the tokens up to that one, inside
/// the layer's sliding window. Head h reads kv_head h / (head_count / kv_head_count). Borrowed.
struct LayerQueries {
  Dtype dtype = Dtype::f32;
  const void* q = nullptr;
  Strides strides;
  uint32_t head_count = 0;
  uint32_t row_count = 0;
  float scale = 0;     // of the logits; 0: 1 / sqrt(k_head_dim)
  float soft_cap = 0;  // logits become cap * tanh(logit / cap); 0: they stay
};

/// The layer whose encoding is to be examined.
struct LayerSpec {
  LayerGeometry geometry;
  Dtype source_dtype = Dtype::f32;
  Profile profile = Profile::any;  // of the document; `auto` chooses
  uint64_t first_token = 0;        // of the segment, in the document
  uint64_t token_count = 0;
};

/// How the layer is to be encoded, and how good that is.
struct LayerChoice {
  Profile profile = Profile::any;      // of the layer
  std::vector<uint32_t> exact_tokens;  // see SegmentWriter::encode_layer
  CertificateEntry certificate{};
};

/// Encodes into memory of its own: as much as the layer takes in the segment, or with `auto` in the
/// source's dtype, and a few hundred decoded tokens. Thread-safe. POLYKV_ERR_INVALID_ARGUMENT: what
/// an encoder refuses, queries of another shape, queries or logits that are not finite.
Result<LayerChoice> examine_layer(const LayerSpec& spec, const KvSource& source,
                                  const LayerQueries& queries);

/// The spec of a segment whose layers were examined, one choice a layer.
void apply_choices(std::span<const LayerChoice> choices, SegmentSpec& spec);

}  // namespace polykv
