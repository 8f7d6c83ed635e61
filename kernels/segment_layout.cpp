#include <cmath>
#include <cstring>

#include "common/digest.h"
#include "kernels/segment.h"

namespace polykv {

namespace {

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Why sums and products of sizes cannot overflow: layers, heads <= 2^10, blocks <= 2^18 and
// block_bytes < 2^20 bound a layer by 2^48 and a segment by 2^58, far beneath 2^64;
// kMaxSegmentBytes is compared afterwards.
static_assert(kMaxLayers <= 1024 && kMaxKvHeads <= 1024 && kMaxHeadDim <= 1024);
static_assert(kMaxTokens / kBlockTokens <= (uint64_t{1} << 18));

Status check_rope(const RopeParameters& rope) {
  if (static_cast<uint32_t>(rope.kind) > static_cast<uint32_t>(RopeKind::interleaved) ||
      static_cast<uint32_t>(rope.scaling) > static_cast<uint32_t>(RopeScaling::llama3)) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("RoPE kind %u or scaling %u is unknown", static_cast<uint32_t>(rope.kind),
                   static_cast<uint32_t>(rope.scaling))};
  }
  if (!std::isfinite(rope.theta) || !std::isfinite(rope.scaling_factor) ||
      rope.rotary_dim > kMaxHeadDim) {
    return {POLYKV_ERR_INVALID_ARGUMENT, "a RoPE parameter is not finite or out of range"};
  }
  return Status::ok();
}

Status check_layer(uint32_t index, const LayerGeometry& layer, const Codec& codec) {
  const auto in_range = [](uint32_t value, uint32_t limit) { return value >= 1 && value <= limit; };
  if (!in_range(layer.kv_head_count, kMaxKvHeads) || !in_range(layer.k_head_dim, kMaxHeadDim) ||
      !in_range(layer.v_head_dim, kMaxHeadDim)) {
    return {POLYKV_ERR_LIMIT,
            format("layer %u has %u kv_heads, K head_dim %u, V head_dim %u; each is 1 to 1024",
                   index, layer.kv_head_count, layer.k_head_dim, layer.v_head_dim)};
  }
  return codec.check_geometry(codec.profile, layer).with_context(format("layer %u", index));
}

/// Of each layer.
Result<std::vector<const Codec*>> layer_codecs(const SegmentSpec& spec) {
  const size_t layer_count = spec.identity.layers.size();
  const bool is_automatic = spec.profile == Profile::automatic;
  if (spec.layer_profiles.size() != (is_automatic ? layer_count : 0)) {
    return {
        POLYKV_ERR_INVALID_ARGUMENT,
        format("%zu layer profiles for %zu layers of profile %s; `auto` has one a layer, others "
               "none",
               spec.layer_profiles.size(), layer_count, profile_name(spec.profile))};
  }
  std::vector<const Codec*> codecs;
  for (size_t i = 0; i < layer_count; ++i) {
    POLYKV_ASSIGN_OR_RETURN(const Codec* codec,
                            require_codec(is_automatic ? spec.layer_profiles[i] : spec.profile));
    if (is_automatic && codec->single_segment_only) {
      return {POLYKV_ERR_UNSUPPORTED, format("layer %zu of an `auto` document cannot be %s", i,
                                             profile_name(codec->profile))};
    }
    codecs.push_back(codec);
  }
  return codecs;
}

Status check_spec(const SegmentSpec& spec, std::span<const Codec* const> codecs) {
  const ModelIdentity& model = spec.identity;
  if (spec.token_count == 0) {
    return {POLYKV_ERR_EMPTY_DOCUMENT, "a segment has at least one token"};
  }
  if (spec.token_count > kMaxTokens || spec.first_token > kMaxTokens - spec.token_count) {
    return {POLYKV_ERR_LIMIT, format("%llu tokens from %llu on: a document has at most %llu",
                                     static_cast<unsigned long long>(spec.token_count),
                                     static_cast<unsigned long long>(spec.first_token),
                                     static_cast<unsigned long long>(kMaxTokens))};
  }
  if (model.layers.empty() || model.layers.size() > kMaxLayers) {
    return {POLYKV_ERR_LIMIT,
            format("%zu layers; a model has 1 to %u", model.layers.size(), kMaxLayers)};
  }
  if (!dtype_is_valid(static_cast<uint32_t>(model.source_dtype))) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("source dtype %u is unknown", static_cast<uint32_t>(model.source_dtype))};
  }
  POLYKV_RETURN_IF_ERROR(check_rope(model.rope));
  if (is_single_segment(spec.profile) && spec.first_token != 0) {
    return {
        POLYKV_ERR_UNSUPPORTED,
        format(
            "%s keeps one scale for the whole document, so a document is one segment from token 0 "
            "on, not %llu; use another profile to continue a document",
            profile_name(spec.profile), static_cast<unsigned long long>(spec.first_token))};
  }
  if (spec.chosen_exact_rows > kMaxChosenExactRows) {
    return {POLYKV_ERR_LIMIT, format("room for %u chosen exact rows; at most %u",
                                     spec.chosen_exact_rows, kMaxChosenExactRows)};
  }
  const uint32_t inner = segment_digest_count(spec.first_token, spec.token_count, false);
  const uint32_t last = segment_digest_count(spec.first_token, spec.token_count, true);
  if (spec.digest_count != inner && spec.digest_count != last) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("%u chain digests; these tokens have %u, or %u when the document ends with them",
                   spec.digest_count, inner, last)};
  }
  for (uint32_t i = 0; i < model.layers.size(); ++i) {
    POLYKV_RETURN_IF_ERROR(check_layer(i, model.layers[i], *codecs[i]));
  }
  return Status::ok();
}

uint32_t exact_row_capacity(const SegmentSpec& spec, const Codec& codec) {
  if (!codec.has_exact_rows) return 0;
  return static_cast<uint32_t>(std::min<uint64_t>(
      spec.token_count, first_exact_rows(spec.first_token) + spec.chosen_exact_rows));
}

/// Appends parts that begin at multiples of 64 and gives their offsets; an empty part is at 0.
class Cursor {
 public:
  explicit Cursor(uint64_t start) : end_(start) {}
  uint64_t append(uint64_t size_bytes) {
    if (size_bytes == 0) return 0;
    const uint64_t offset = round_up(end_, kSegmentAlignBytes);
    end_ = offset + size_bytes;
    return offset;
  }
  uint64_t end() const { return end_; }

 private:
  uint64_t end_;
};

LayerRecord plan_layer(const SegmentSpec& spec, const Codec& codec, const LayerGeometry& geometry,
                       Cursor& cursor) {
  LayerRecord record{};
  record.kv_head_count = geometry.kv_head_count;
  record.k_head_dim = geometry.k_head_dim;
  record.v_head_dim = geometry.v_head_dim;
  record.sliding_window = geometry.sliding_window;
  record.profile = static_cast<uint32_t>(codec.profile);
  record.block_tokens = kBlockTokens;
  record.exact_row_capacity = exact_row_capacity(spec, codec);
  record.block_bytes = codec.block_bytes(codec.profile, geometry, spec.identity.source_dtype);
  record.block_count = (spec.token_count + kBlockTokens - 1) / kBlockTokens;
  const uint64_t heads = geometry.kv_head_count;
  const uint64_t rows = record.exact_row_capacity;
  record.payload_offset = round_up(cursor.end(), kSegmentAlignBytes);
  record.k_means_bytes = codec.centres_k ? heads * geometry.k_head_dim * sizeof(float) : 0;
  record.k_means_offset = cursor.append(record.k_means_bytes);
  record.exact_tokens_bytes = rows * sizeof(uint32_t);
  record.exact_tokens_offset = cursor.append(record.exact_tokens_bytes);
  record.exact_k_bytes = rows * heads * geometry.k_head_dim * sizeof(uint16_t);
  record.exact_k_offset = cursor.append(record.exact_k_bytes);
  record.exact_v_bytes = rows * heads * geometry.v_head_dim * sizeof(uint16_t);
  record.exact_v_offset = cursor.append(record.exact_v_bytes);
  record.blocks_bytes = heads * record.block_count * record.block_bytes;
  record.blocks_offset = cursor.append(record.blocks_bytes);
  record.payload_bytes = cursor.end() - record.payload_offset;
  return record;
}

void fill_identity(SegmentHeader& header, const ModelIdentity& model) {
  header.source_dtype = static_cast<uint32_t>(model.source_dtype);
  std::memcpy(header.model_fingerprint, model.fingerprint.data(), sizeof header.model_fingerprint);
  const Digest root = chain_root(model);
  std::memcpy(header.root_digest, root.data(), sizeof header.root_digest);
  header.rope_kind = static_cast<uint32_t>(model.rope.kind);
  header.rope_scaling = static_cast<uint32_t>(model.rope.scaling);
  header.rope_rotary_dim = model.rope.rotary_dim;
  header.rope_original_context = model.rope.original_context;
  header.rope_theta = model.rope.theta;
  header.rope_scaling_factor = model.rope.scaling_factor;
}

}  // namespace

uint32_t segment_digest_count(uint64_t first_token, uint64_t token_count, bool ends_document) {
  const uint64_t end = first_token + token_count;
  const uint64_t boundaries = end / kChunkTokens - first_token / kChunkTokens;
  const bool tail = ends_document && end % kChunkTokens != 0;
  return static_cast<uint32_t>(boundaries + (tail ? 1 : 0));
}

Result<SegmentLayout> plan_segment(const SegmentSpec& spec) {
  POLYKV_ASSIGN_OR_RETURN(const std::vector<const Codec*> codecs, layer_codecs(spec));
  POLYKV_RETURN_IF_ERROR(check_spec(spec, codecs));
  const auto layer_count = static_cast<uint32_t>(spec.identity.layers.size());

  SegmentLayout layout;
  SegmentHeader& header = layout.header;
  std::memcpy(header.magic, kSegmentMagic, sizeof header.magic);
  header.format_version = kSegmentFormatVersion;
  header.header_bytes = sizeof(SegmentHeader);
  header.first_token = spec.first_token;
  header.token_count = spec.token_count;
  header.layer_count = layer_count;
  header.layer_record_bytes = sizeof(LayerRecord);
  header.digest_count = spec.digest_count;
  header.profile = static_cast<uint32_t>(spec.profile);
  fill_identity(header, spec.identity);

  Cursor cursor(sizeof(SegmentHeader));
  header.layer_table_offset = cursor.append(layer_count * sizeof(LayerRecord));
  header.token_ids_offset = cursor.append(spec.token_count * sizeof(uint32_t));
  header.digests_offset = cursor.append(spec.digest_count * sizeof(Digest));
  if (spec.has_certificate) {
    header.certificate_entry_bytes = sizeof(CertificateEntry);
    header.certificate_count = layer_count;
    header.certificate_offset = cursor.append(layer_count * sizeof(CertificateEntry));
  }
  header.data_offset = round_up(cursor.end(), kSegmentPageBytes);
  cursor = Cursor(header.data_offset);
  layout.records.reserve(layer_count);
  for (uint32_t i = 0; i < layer_count; ++i) {
    layout.records.push_back(plan_layer(spec, *codecs[i], spec.identity.layers[i], cursor));
  }
  header.data_bytes = cursor.end() - header.data_offset;
  header.total_bytes = round_up(cursor.end(), kSegmentPageBytes);
  if (header.total_bytes > kMaxSegmentBytes) {
    return {POLYKV_ERR_LIMIT, format("a segment of %llu bytes; the limit is %llu",
                                     static_cast<unsigned long long>(header.total_bytes),
                                     static_cast<unsigned long long>(kMaxSegmentBytes))};
  }
  return layout;
}

Result<uint64_t> segment_size_bytes(const SegmentSpec& spec) {
  POLYKV_ASSIGN_OR_RETURN(const SegmentLayout layout, plan_segment(spec));
  return layout.header.total_bytes;
}

}  // namespace polykv
