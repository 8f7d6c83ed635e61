// Segments: size, write, validate, read. The bytes belong to the caller (a memfd's mapping, a
// buffer, a file's mapping).
//
//   producer:  segment_size_bytes -> SegmentWriter::create -> encode_layer, once a layer -> finish
//   reader:    SegmentView::open -> verify_checksums (where bytes are not yet trusted) ->
//   decode_layer
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "common/result.h"
#include "include/internal/geometry.h"
#include "include/internal/segment_format.h"
#include "kernels/codec.h"

namespace polykv {

/// No segment is larger: beyond any machine of today, and small enough that sums of sizes cannot
/// overflow.
inline constexpr uint64_t kMaxSegmentBytes = uint64_t{1} << 42;
inline constexpr uint32_t kMaxChosenExactRows = 4096;

/// Everything the size of a segment depends on.
struct SegmentSpec {
  ModelIdentity identity;
  Profile profile = Profile::exact;
  std::vector<Profile> layer_profiles;  // one a layer if `profile` is automatic, otherwise empty
  uint64_t first_token = 0;             // position in the document
  uint64_t token_count = 0;
  uint32_t digest_count = 0;  // see segment_digest_count
  uint32_t chosen_exact_rows =
      0;  // room for rows chosen by the producer, beyond the document's first four
  bool has_certificate = false;
};

/// How many chain digests a segment carries: one for each multiple of 256 in (first_token, end],
/// and one more when the document ends with this segment off such a boundary.
uint32_t segment_digest_count(uint64_t first_token, uint64_t token_count, bool ends_document);

/// Where everything is. `records` lack checksums, exact_row_count and scales; `header` lacks its
/// checksum and digests.
struct SegmentLayout {
  SegmentHeader header{};
  std::vector<LayerRecord> records;
};
/// Pure; the arithmetic cannot overflow. Errors: POLYKV_ERR_UNSUPPORTED (no codec of a profile,
/// a geometry it cannot hold, a single-segment profile not at token 0), POLYKV_ERR_LIMIT,
/// POLYKV_ERR_INVALID_ARGUMENT, POLYKV_ERR_EMPTY_DOCUMENT.
Result<SegmentLayout> plan_segment(const SegmentSpec& spec);

/// total_bytes of plan_segment: what admission asks for before anything is allocated.
Result<uint64_t> segment_size_bytes(const SegmentSpec& spec);

/// What a segment says about its tokens. Borrowed during SegmentWriter::create.
struct SegmentContents {
  std::span<const uint32_t> token_ids;  // token_count of them
  Digest parent{};  // chain digest at the last multiple of 256 <= first_token; the root at 0
  std::span<const Digest> digests;  // digest_count of them, in order
  PrefixTreatment prefix = PrefixTreatment::none;
};

/// Fills a segment. Movable; the bytes must outlive it. encode_layer and set_certificate may run for
/// different layers on different threads; everything else is for one thread.
class SegmentWriter {
 public:
  /// `bytes`: at least segment_size_bytes(spec), 64-byte aligned. All but the payloads is zeroed,
  /// and no header is written before finish, so an unfinished segment never opens.
  static Result<SegmentWriter> create(const SegmentSpec& spec, const SegmentContents& contents,
                                      std::span<uint8_t> bytes);

  /// Encodes one layer, once; after an error it may be tried again. `chosen_exact_tokens`:
  /// ascending, counted from the segment's first token, at most spec.chosen_exact_rows; the
  /// document's first four need not be among them. Errors name the layer.
  Status encode_layer(uint32_t layer, const KvSource& source,
                      std::span<const uint32_t> chosen_exact_tokens = {},
                      Backend backend = active_backend());

  /// As encode_layer, by something else than a codec of this process: `fill` gets the layer's slot, as
  /// Codec::encode does.
  Status fill_layer(uint32_t layer, std::span<const uint32_t> chosen_exact_tokens,
                    const std::function<Status(LayerSlot&)>& fill);
  /// A layer's bytes. The layer exists.
  std::span<uint8_t> layer_payload(uint32_t layer);
  /// How the layer is laid out, without its exact rows; of a layer that exists.
  LayerSlot layer_slot(uint32_t layer);

  /// Needs spec.has_certificate.
  Status set_certificate(uint32_t layer, float relative_error, uint32_t query_count);

  /// Checksums and header; all layers must be encoded. Afterwards the segment opens and verifies.
  Status finish();

  const SegmentHeader& header() const { return layout_.header; }

 private:
  SegmentWriter() = default;

  SegmentLayout layout_;
  std::span<uint8_t> bytes_;
  std::vector<uint8_t> encoded_;  // a byte a layer, so that threads do not share an element
  bool finished_ = false;
};

/// A validated view of a segment's bytes: header and layer table are copied out, checked, and used
/// from the copy; so bytes that change under it can make decoded values wrong but never lead
/// outside the span. Copyable, non-owning, thread-safe to read.
class SegmentView {
 public:
  /// Errors: POLYKV_ERR_CORRUPT (what is wrong where), POLYKV_ERR_VERSION (both versions),
  /// POLYKV_ERR_UNSUPPORTED (a profile without a codec), POLYKV_ERR_INVALID_ARGUMENT (bytes not
  /// 64-byte aligned). Reads the header and the layer table, no payload. Bytes behind total_bytes
  /// are ignored.
  static Result<SegmentView> open(std::span<const uint8_t> bytes);

  /// Header and every layer. Reads all bytes. POLYKV_ERR_CORRUPT names what does not match.
  Status verify_checksums() const;
  Status verify_header_checksum() const;
  Status verify_layer_checksum(uint32_t layer) const;

  const SegmentHeader& header() const { return header_; }
  Profile profile() const { return static_cast<Profile>(header_.profile); }
  uint64_t first_token() const { return header_.first_token; }
  uint64_t token_count() const { return header_.token_count; }
  uint32_t layer_count() const { return header_.layer_count; }
  const LayerRecord& layer_record(uint32_t layer) const { return records_[layer]; }
  LayerView layer(uint32_t layer) const;
  std::span<const uint8_t> layer_payload(uint32_t layer) const;
  std::span<const uint32_t> token_ids() const;
  std::vector<Digest> digests() const;
  Digest root_digest() const;
  Digest parent_digest() const;
  PrefixTreatment prefix() const {
    return static_cast<PrefixTreatment>(header_.flags & kSegmentPrefixMask);
  }
  /// One a layer; empty without a certificate.
  std::vector<CertificateEntry> certificate() const;
  /// Without the name.
  ModelIdentity identity() const;
  std::span<const uint8_t> bytes() const { return bytes_; }

 private:
  SegmentView() = default;

  std::span<const uint8_t> bytes_;
  SegmentHeader header_{};
  std::vector<LayerRecord> records_;
};

/// Decodes a token range of one layer into the caller's memory, which must hold what `target`
/// addresses. POLYKV_ERR_INVALID_ARGUMENT: no such layer, a range outside the segment, an unknown
/// dtype.
Status decode_layer(const SegmentView& view, uint32_t layer, const DecodeTarget& target,
                    Backend backend = active_backend());

}  // namespace polykv
