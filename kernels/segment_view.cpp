#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/segment.h"
#include "kernels/segment_parts.h"

namespace polykv {

namespace {

Status corrupt(std::string cause) {
  return {POLYKV_ERR_CORRUPT, "open segment: " + std::move(cause)};
}

/// What has to hold before the layer table can be read.
Status check_frame(const SegmentHeader& header, size_t size_bytes) {
  if (std::memcmp(header.magic, kSegmentMagic, sizeof header.magic) != 0) {
    return corrupt("the magic bytes are not those of a segment");
  }
  if (header.format_version != kSegmentFormatVersion) {
    return {POLYKV_ERR_VERSION, format("open segment: it has format version %u, this build reads "
                                       "version %u; publish the document anew",
                                       header.format_version, kSegmentFormatVersion)};
  }
  if (header.header_bytes != sizeof(SegmentHeader) ||
      header.layer_record_bytes != sizeof(LayerRecord) ||
      header.layer_table_offset != sizeof(SegmentHeader)) {
    return corrupt("sizes of header or layer records are not those of version 1");
  }
  if (header.layer_count == 0 || header.layer_count > kMaxLayers) {
    return corrupt(format("%u layers; a model has 1 to %u", header.layer_count, kMaxLayers));
  }
  if (header.total_bytes > size_bytes ||
      sizeof(SegmentHeader) + header.layer_count * sizeof(LayerRecord) > size_bytes) {
    return corrupt(format("truncated: %zu bytes of %llu", size_bytes,
                          static_cast<unsigned long long>(header.total_bytes)));
  }
  return Status::ok();
}

ModelIdentity identity_of(const SegmentHeader& header, std::span<const LayerRecord> records) {
  ModelIdentity identity;
  std::memcpy(identity.fingerprint.data(), header.model_fingerprint, identity.fingerprint.size());
  identity.source_dtype = static_cast<Dtype>(header.source_dtype);
  identity.rope = {static_cast<RopeKind>(header.rope_kind),
                   static_cast<RopeScaling>(header.rope_scaling),
                   header.rope_rotary_dim,
                   header.rope_theta,
                   header.rope_scaling_factor,
                   header.rope_original_context};
  for (const LayerRecord& record : records) {
    identity.layers.push_back(
        {record.kv_head_count, record.k_head_dim, record.v_head_dim, record.sliding_window});
  }
  return identity;
}

/// The spec whose plan the segment must equal.
Result<SegmentSpec> spec_of(const SegmentHeader& header, std::span<const LayerRecord> records) {
  SegmentSpec spec;
  spec.identity = identity_of(header, records);
  spec.profile = static_cast<Profile>(header.profile);
  spec.first_token = header.first_token;
  spec.token_count = header.token_count;
  spec.digest_count = header.digest_count;
  spec.has_certificate = header.certificate_offset != 0;
  uint32_t capacity = 0;  // `exact` layers have none, the others all the same
  for (const LayerRecord& record : records) {
    capacity = std::max(capacity, record.exact_row_capacity);
    if (spec.profile == Profile::automatic)
      spec.layer_profiles.push_back(static_cast<Profile>(record.profile));
  }
  const uint32_t first = first_exact_rows(header.first_token);
  if (capacity > kMaxChosenExactRows + kFirstExactRows) {
    return corrupt(format("room for %u exact rows", capacity));
  }
  spec.chosen_exact_rows = capacity > first ? capacity - first : 0;
  return spec;
}

/// Takes over from the actual header and records what a plan does not determine, once it is in
/// range.
Status take_free_fields(const SegmentHeader& header, std::span<const LayerRecord> records,
                        SegmentLayout& expected) {
  if (header.flags > static_cast<uint32_t>(PrefixTreatment::recomputed)) {
    return corrupt(format("unknown flags %#x", header.flags));
  }
  expected.header.flags = header.flags;
  expected.header.header_checksum = header.header_checksum;
  std::memcpy(expected.header.parent_digest, header.parent_digest, sizeof header.parent_digest);
  const auto exponent_ok = [](int32_t exponent) { return exponent >= -126 && exponent <= 127; };
  for (size_t i = 0; i < records.size(); ++i) {
    const LayerRecord& record = records[i];
    LayerRecord& plan = expected.records[i];
    if (record.exact_row_count > plan.exact_row_capacity) {
      return corrupt(format("layer %zu has %u exact rows and room for %u", i,
                            record.exact_row_count, plan.exact_row_capacity));
    }
    if (!std::isfinite(record.k_scale) || !exponent_ok(record.k_gain_exponent) ||
        !exponent_ok(record.v_gain_exponent) || !exponent_ok(record.exact_k_exponent) ||
        !exponent_ok(record.exact_v_exponent)) {
      return corrupt(format("layer %zu has a scale out of range", i));
    }
    plan.exact_row_count = record.exact_row_count;
    plan.payload_checksum = record.payload_checksum;
    plan.k_scale = record.k_scale;
    plan.k_gain_exponent = record.k_gain_exponent;
    plan.v_gain_exponent = record.v_gain_exponent;
    plan.exact_k_exponent = record.exact_k_exponent;
    plan.exact_v_exponent = record.exact_v_exponent;
  }
  return Status::ok();
}

template <typename T>
Status check_equal(const T& actual, const T& expected, const std::string& what) {
  uint8_t a[sizeof(T)];
  uint8_t e[sizeof(T)];
  std::memcpy(a, &actual, sizeof a);
  std::memcpy(e, &expected, sizeof e);
  for (size_t i = 0; i < sizeof a; ++i) {
    if (a[i] != e[i]) {
      return corrupt(format("byte %zu of %s is %u; geometry, profile and counts ask for %u", i,
                            what.c_str(), a[i], e[i]));
    }
  }
  return Status::ok();
}

}  // namespace

Result<SegmentView> SegmentView::open(std::span<const uint8_t> bytes) {
  if (!is_aligned(bytes.data())) {
    return {POLYKV_ERR_INVALID_ARGUMENT, "open segment: the bytes are not 64-byte aligned"};
  }
  if (bytes.size() < sizeof(SegmentHeader)) {
    return corrupt(
        format("truncated: %zu bytes, a header has %zu", bytes.size(), sizeof(SegmentHeader)));
  }
  SegmentView view;
  std::memcpy(&view.header_, bytes.data(), sizeof(SegmentHeader));
  const SegmentHeader& header = view.header_;
  POLYKV_RETURN_IF_ERROR(check_frame(header, bytes.size()));
  view.records_.resize(header.layer_count);
  std::memcpy(view.records_.data(), bytes.data() + sizeof(SegmentHeader),
              header.layer_count * sizeof(LayerRecord));
  POLYKV_ASSIGN_OR_RETURN(const SegmentSpec spec, spec_of(header, view.records_));
  Result<SegmentLayout> planned = plan_segment(spec);
  if (!planned.is_ok()) {
    const Status& cause = planned.status();
    if (cause.code() == POLYKV_ERR_UNSUPPORTED) return cause.with_context("open segment");
    return corrupt(cause.message());
  }
  POLYKV_RETURN_IF_ERROR(take_free_fields(header, view.records_, *planned));
  POLYKV_RETURN_IF_ERROR(check_equal(header, planned->header, "the header"));
  for (uint32_t i = 0; i < header.layer_count; ++i) {
    POLYKV_RETURN_IF_ERROR(
        check_equal(view.records_[i], planned->records[i], format("layer record %u", i)));
  }
  // Equal to a plan, so every part lies in [0, total_bytes), which check_frame found inside
  // `bytes`.
  view.bytes_ = bytes.first(header.total_bytes);
  return view;
}

Status SegmentView::verify_header_checksum() const {
  static constexpr uint8_t kZero[sizeof header_.header_checksum] = {};
  const uint64_t after = kChecksumOffset + sizeof kZero;
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(),
                                                                              XXH3_freeState);
  if (state == nullptr) return {POLYKV_ERR_NO_MEMORY, "verify segment: no memory for a checksum"};
  XXH3_64bits_reset(state.get());
  XXH3_64bits_update(state.get(), bytes_.data(), kChecksumOffset);
  XXH3_64bits_update(state.get(), kZero, sizeof kZero);
  XXH3_64bits_update(state.get(), bytes_.data() + after, header_.data_offset - after);
  if (XXH3_64bits_digest(state.get()) != header_.header_checksum) {
    return {POLYKV_ERR_CORRUPT, "verify segment: the header's checksum does not match"};
  }
  return Status::ok();
}

Status SegmentView::verify_layer_checksum(uint32_t layer) const {
  const std::span<const uint8_t> payload = layer_payload(layer);
  if (XXH3_64bits(payload.data(), payload.size()) != records_[layer].payload_checksum) {
    return {POLYKV_ERR_CORRUPT,
            format("verify segment: the checksum of layer %u does not match", layer)};
  }
  return Status::ok();
}

Status SegmentView::verify_checksums() const {
  POLYKV_RETURN_IF_ERROR(verify_header_checksum());
  for (uint32_t layer = 0; layer < layer_count(); ++layer) {
    POLYKV_RETURN_IF_ERROR(verify_layer_checksum(layer));
  }
  return Status::ok();
}

LayerView SegmentView::layer(uint32_t layer) const {
  assert(layer < records_.size());
  return layer_parts<LayerView>(header_, records_[layer], bytes_.data());
}

std::span<const uint8_t> SegmentView::layer_payload(uint32_t layer) const {
  assert(layer < records_.size());
  return bytes_.subspan(records_[layer].payload_offset, records_[layer].payload_bytes);
}

std::span<const uint32_t> SegmentView::token_ids() const {
  return {reinterpret_cast<const uint32_t*>(bytes_.data() + header_.token_ids_offset),
          header_.token_count};
}

std::vector<Digest> SegmentView::digests() const {
  std::vector<Digest> digests(header_.digest_count);
  if (!digests.empty()) {
    std::memcpy(digests.data(), bytes_.data() + header_.digests_offset,
                digests.size() * sizeof(Digest));
  }
  return digests;
}

Digest SegmentView::root_digest() const {
  Digest digest;
  std::memcpy(digest.data(), header_.root_digest, digest.size());
  return digest;
}

Digest SegmentView::parent_digest() const {
  Digest digest;
  std::memcpy(digest.data(), header_.parent_digest, digest.size());
  return digest;
}

std::vector<CertificateEntry> SegmentView::certificate() const {
  std::vector<CertificateEntry> entries(header_.certificate_count);
  if (!entries.empty()) {
    std::memcpy(entries.data(), bytes_.data() + header_.certificate_offset,
                entries.size() * sizeof(CertificateEntry));
  }
  return entries;
}

ModelIdentity SegmentView::identity() const {
  return identity_of(header_, records_);
}

Status decode_layer(const SegmentView& view, uint32_t layer, const DecodeTarget& target,
                    Backend backend) {
  if (layer >= view.layer_count()) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("decode layer %u: the document has %u layers", layer, view.layer_count())};
  }
  if (target.token_count > view.token_count() ||
      target.first_token > view.token_count() - target.token_count) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("decode layer %u: tokens %llu + %llu are not within the segment's %llu", layer,
                   static_cast<unsigned long long>(target.first_token),
                   static_cast<unsigned long long>(target.token_count),
                   static_cast<unsigned long long>(view.token_count()))};
  }
  if (!dtype_is_valid(static_cast<uint32_t>(target.dtype))) {
    return {POLYKV_ERR_INVALID_ARGUMENT, format("decode layer %u: dtype %u is unknown", layer,
                                                static_cast<uint32_t>(target.dtype))};
  }
  const LayerView layer_view = view.layer(layer);
  POLYKV_ASSIGN_OR_RETURN(const Codec* codec, require_codec(layer_view.profile, backend));
  if (target.token_count != 0) codec->decode(layer_view, target);
  return Status::ok();
}

}  // namespace polykv
