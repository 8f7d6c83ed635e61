#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "kernels/segment.h"
#include "kernels/segment_parts.h"

namespace polykv {

namespace {

Status check_contents(const SegmentSpec& spec, const SegmentContents& contents) {
  if (contents.token_ids.size() != spec.token_count ||
      contents.digests.size() != spec.digest_count) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("%zu token ids and %zu digests were given for %llu and %u",
                   contents.token_ids.size(), contents.digests.size(),
                   static_cast<unsigned long long>(spec.token_count), spec.digest_count)};
  }
  return Status::ok();
}

Status check_chosen(std::span<const uint32_t> chosen, const LayerRecord& record,
                    uint64_t token_count) {
  if (chosen.size() > record.exact_row_capacity) {
    return {POLYKV_ERR_INVALID_ARGUMENT, format("%zu exact rows were chosen, there is room for %u",
                                                chosen.size(), record.exact_row_capacity)};
  }
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (chosen[i] >= token_count || (i > 0 && chosen[i] <= chosen[i - 1])) {
      return {POLYKV_ERR_INVALID_ARGUMENT,
              format("chosen exact token %u is not ascending and inside the segment", chosen[i])};
    }
  }
  return Status::ok();
}

/// The document's first tokens and the chosen ones, ascending, each once.
std::vector<uint32_t> exact_tokens(const SegmentHeader& header, std::span<const uint32_t> chosen) {
  const auto first = static_cast<uint32_t>(
      std::min<uint64_t>(first_exact_rows(header.first_token), header.token_count));
  std::vector<uint32_t> tokens;
  for (uint32_t token = 0; token < first; ++token) tokens.push_back(token);
  std::copy_if(chosen.begin(), chosen.end(), std::back_inserter(tokens),
               [&](uint32_t token) { return token >= first; });
  return tokens;
}

Status check_source(const KvSource& source) {
  if (source.k == nullptr || source.v == nullptr ||
      !dtype_is_valid(static_cast<uint32_t>(source.dtype))) {
    return {POLYKV_ERR_INVALID_ARGUMENT, "K or V is null or of an unknown dtype"};
  }
  return Status::ok();
}

}  // namespace

Result<SegmentWriter> SegmentWriter::create(const SegmentSpec& spec,
                                            const SegmentContents& contents,
                                            std::span<uint8_t> bytes) {
  POLYKV_ASSIGN_OR_RETURN(SegmentLayout layout, plan_segment(spec));
  POLYKV_RETURN_IF_ERROR(check_contents(spec, contents));
  SegmentHeader& header = layout.header;
  if (bytes.size() < header.total_bytes || !is_aligned(bytes.data())) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("a segment of %llu bytes needs as many, 64-byte aligned; %zu were given",
                   static_cast<unsigned long long>(header.total_bytes), bytes.size())};
  }
  header.flags = static_cast<uint32_t>(contents.prefix) & kSegmentPrefixMask;
  std::memcpy(header.parent_digest, contents.parent.data(), sizeof header.parent_digest);
  bytes = bytes.first(header.total_bytes);
  std::memset(bytes.data(), 0, header.data_offset);
  const uint64_t data_end = header.data_offset + header.data_bytes;
  std::memset(bytes.data() + data_end, 0, header.total_bytes - data_end);
  std::memcpy(bytes.data() + header.token_ids_offset, contents.token_ids.data(),
              contents.token_ids.size_bytes());
  if (!contents.digests.empty()) {
    std::memcpy(bytes.data() + header.digests_offset, contents.digests.data(),
                contents.digests.size_bytes());
  }
  SegmentWriter writer;
  writer.encoded_.assign(header.layer_count, 0);
  writer.layout_ = std::move(layout);
  writer.bytes_ = bytes;
  return writer;
}

Status SegmentWriter::encode_layer(uint32_t layer, const KvSource& source,
                                   std::span<const uint32_t> chosen_exact_tokens, Backend backend) {
  return fill_layer(layer, chosen_exact_tokens, [&](LayerSlot& slot) -> Status {
    POLYKV_RETURN_IF_ERROR(check_source(source));
    POLYKV_ASSIGN_OR_RETURN(const Codec* codec, require_codec(slot.profile, backend));
    return codec->encode(source, slot);
  });
}

std::span<uint8_t> SegmentWriter::layer_payload(uint32_t layer) {
  const LayerRecord& record = layout_.records[layer];
  return bytes_.subspan(record.payload_offset, record.payload_bytes);
}

LayerSlot SegmentWriter::layer_slot(uint32_t layer) {
  return layer_parts<LayerSlot>(layout_.header, layout_.records[layer], bytes_.data());
}

Status SegmentWriter::fill_layer(uint32_t layer, std::span<const uint32_t> chosen_exact_tokens,
                                 const std::function<Status(LayerSlot&)>& fill) {
  const std::string context = format("encode layer %u", layer);
  if (layer >= layout_.records.size() || finished_ || encoded_[layer] != 0) {
    return Status(POLYKV_ERR_INVALID_ARGUMENT,
                  "no such layer, or it is encoded already, or the segment is finished")
        .with_context(context);
  }
  LayerRecord& record = layout_.records[layer];
  POLYKV_ASSIGN_OR_RETURN(const Codec* codec, require_codec(static_cast<Profile>(record.profile)));

  // Payloads are contiguous but for the alignment between them; each layer zeroes up to the next
  // one's start.
  uint8_t* payload = bytes_.data() + record.payload_offset;
  const uint64_t end = layer + 1 < layout_.records.size()
                           ? layout_.records[layer + 1].payload_offset
                           : layout_.header.data_offset + layout_.header.data_bytes;
  std::memset(payload, 0, end - record.payload_offset);

  record.exact_row_count = 0;
  if (codec->has_exact_rows) {
    POLYKV_RETURN_IF_ERROR(check_chosen(chosen_exact_tokens, record, layout_.header.token_count)
                               .with_context(context));
    const std::vector<uint32_t> tokens = exact_tokens(layout_.header, chosen_exact_tokens);
    if (tokens.size() > record.exact_row_capacity) {
      return Status(POLYKV_ERR_INVALID_ARGUMENT, "more exact rows than the segment has room for")
          .with_context(context);
    }
    record.exact_row_count = static_cast<uint32_t>(tokens.size());
    if (!tokens.empty()) {
      std::memcpy(bytes_.data() + record.exact_tokens_offset, tokens.data(),
                  tokens.size() * sizeof(uint32_t));
    }
  }
  LayerSlot slot = layer_slot(layer);
  POLYKV_RETURN_IF_ERROR(fill(slot).with_context(context));
  record.k_scale = slot.scales.k_scale;
  record.k_gain_exponent = slot.scales.k_gain_exponent;
  record.v_gain_exponent = slot.scales.v_gain_exponent;
  record.exact_k_exponent = slot.scales.exact_k_exponent;
  record.exact_v_exponent = slot.scales.exact_v_exponent;
  record.payload_checksum = XXH3_64bits(payload, record.payload_bytes);
  encoded_[layer] = 1;
  return Status::ok();
}

Status SegmentWriter::set_certificate(uint32_t layer, float relative_error, uint32_t query_count) {
  const SegmentHeader& header = layout_.header;
  if (header.certificate_offset == 0 || layer >= header.layer_count || finished_) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("certificate of layer %u: the segment has no place for it", layer)};
  }
  const CertificateEntry entry{relative_error, query_count, {}};
  std::memcpy(bytes_.data() + header.certificate_offset + layer * sizeof entry, &entry,
              sizeof entry);
  return Status::ok();
}

Status SegmentWriter::finish() {
  SegmentHeader& header = layout_.header;
  for (uint32_t layer = 0; layer < header.layer_count; ++layer) {
    if (encoded_[layer] == 0) {
      return {POLYKV_ERR_INVALID_ARGUMENT,
              format("finish: layer %u of %u was not encoded", layer, header.layer_count)};
    }
  }
  std::memcpy(bytes_.data() + header.layer_table_offset, layout_.records.data(),
              layout_.records.size() * sizeof(LayerRecord));
  header.header_checksum = 0;
  std::memcpy(bytes_.data(), &header, sizeof header);
  header.header_checksum = XXH3_64bits(bytes_.data(), header.data_offset);
  std::memcpy(bytes_.data() + kChecksumOffset, &header.header_checksum,
              sizeof header.header_checksum);
  finished_ = true;
  return Status::ok();
}

}  // namespace polykv
