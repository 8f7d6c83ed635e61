// Segment format version 1: the bytes of one segment, the same in a memfd, in a file and in a
// remote store; a GPU allocation holds the part from data_offset on. docs/segment-format.md draws
// every byte.
//
//   0            SegmentHeader                       512 bytes
//   512          LayerRecord[layer_count]            256 bytes each
//   token ids    uint32[token_count]                 \ each begins at the next multiple of 64
//   digests      Digest[digest_count]                |
//   certificate  CertificateEntry[layer_count or 0]  /
//   data_offset  multiple of 4096: the payload of layer 0, then of layer 1, ...
//                  K means       fp32   [kv_head, k_head_dim]
//                  exact tokens  uint32 [exact_row_capacity]
//                  exact K rows  fp16   [kv_head, exact row, k_head_dim]
//                  exact V rows  fp16   [kv_head, exact row, v_head_dim]
//                  blocks        [kv_head, block], block_bytes each
//                each part begins at the next multiple of 64; a part that the profile does not
//                have is 0 bytes and its offset is 0
//   total_bytes  multiple of 4096
//
// All numbers are little-endian. Offsets count from the segment's first byte; nothing is a pointer.
// Every offset follows from geometry, profile and counts in exactly one way, and a reader compares
// instead of believing (plan_segment in kernels/segment.h), so parts are always in range, aligned
// and apart. Gaps, reserved fields and unused slots are zero.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace polykv {

static_assert(std::endian::native == std::endian::little, "the format is read in place");

inline constexpr uint32_t kSegmentFormatVersion = 1;
inline constexpr uint8_t kSegmentMagic[8] = {'P', 'O', 'L', 'Y', 'K', 'V', 'S', 'G'};

inline constexpr uint64_t kSegmentPageBytes = 4096;  // data_offset and total_bytes are multiples
inline constexpr uint64_t kSegmentAlignBytes = 64;   // parts and blocks begin at multiples
inline constexpr uint32_t kBlockTokens =
    64;  // tokens in a block, the last one of a segment included

/// How the tokens before a segment were treated when its KV was computed: bits 0 and 1 of
/// SegmentHeader::flags. The other bits are zero.
enum class PrefixTreatment : uint32_t {
  none = 0,        // exact in the producer's own cache, or there was no prefix
  decoded = 1,     // decoded from the pool
  recomputed = 2,  // in the pool, but computed again
};
inline constexpr uint32_t kSegmentPrefixMask = 3;

/// That of several segments as a whole: decoded, else recomputed, else none.
constexpr PrefixTreatment stronger(PrefixTreatment a, PrefixTreatment b) {
  if (a == PrefixTreatment::decoded || b == PrefixTreatment::none) return a;
  return b;
}

struct SegmentHeader {
  uint8_t magic[8];
  uint32_t format_version;
  uint32_t header_bytes;     // sizeof(SegmentHeader)
  uint64_t header_checksum;  // XXH3-64 of [0, data_offset) with this field as zero
  uint64_t total_bytes;      // of the whole object
  uint64_t data_offset;
  uint64_t data_bytes;   // payloads of all layers, before the padding to total_bytes
  uint64_t first_token;  // position of the segment's first token in its document
  uint64_t token_count;
  uint32_t layer_count;
  uint32_t layer_record_bytes;  // sizeof(LayerRecord)
  uint64_t layer_table_offset;
  uint64_t token_ids_offset;
  uint64_t digests_offset;
  uint32_t digest_count;
  uint32_t flags;
  uint64_t certificate_offset;  // 0: no certificate
  uint32_t certificate_entry_bytes;
  uint32_t certificate_count;  // layer_count or 0
  uint32_t profile;            // Profile of the document
  uint32_t source_dtype;       // Dtype in which K and V were computed
  uint8_t model_fingerprint[32];
  uint8_t root_digest[32];    // chain_root of the model's identity
  uint8_t parent_digest[32];  // chain digest at the last multiple of 256 tokens <= first_token; the
                              // root at 0
  uint32_t rope_kind;
  uint32_t rope_scaling;
  uint32_t rope_rotary_dim;
  uint32_t rope_original_context;
  double rope_theta;
  double rope_scaling_factor;
  uint8_t reserved[256];
};

struct LayerRecord {
  uint32_t kv_head_count;
  uint32_t k_head_dim;
  uint32_t v_head_dim;
  uint32_t sliding_window;  // tokens; 0: none
  uint32_t profile;         // Profile of this layer
  uint32_t block_tokens;    // kBlockTokens
  uint32_t exact_row_capacity;
  uint32_t exact_row_count;  // <= capacity; the slots behind it are zero
  uint64_t block_bytes;      // multiple of 64
  uint64_t block_count;      // of one kv_head: ceil(token_count / block_tokens)
  uint64_t payload_offset;
  uint64_t payload_bytes;
  uint64_t payload_checksum;  // XXH3-64 of the payload
  uint64_t k_means_offset;
  uint64_t k_means_bytes;
  uint64_t exact_tokens_offset;  // ascending, counted from the segment's first token
  uint64_t exact_tokens_bytes;
  uint64_t exact_k_offset;
  uint64_t exact_k_bytes;
  uint64_t exact_v_offset;
  uint64_t exact_v_bytes;
  uint64_t blocks_offset;
  uint64_t blocks_bytes;
  float k_scale;  // paper-k8v3: K = code * k_scale; other profiles 0
  int32_t
      k_gain_exponent;  // a K gain is its fp16 times 2^this; -126 .. 127, as the other exponents
  int32_t v_gain_exponent;   // a V gain or norm is its fp16 times 2^this
  int32_t exact_k_exponent;  // an element of an exact K row is its fp16 times 2^this
  int32_t exact_v_exponent;  // an element of an exact V row is its fp16 times 2^this
  uint32_t reserved[21];
};

/// Quality certificate of one layer, measured by the producer against the K and V before encoding.
struct CertificateEntry {
  float relative_error;  // ||attention output - exact output|| / ||exact output||
  uint32_t query_count;  // queries it was measured with; 0: not measured
  uint32_t reserved[2];
};

inline constexpr uint64_t kChecksumOffset = offsetof(SegmentHeader, header_checksum);

static_assert(sizeof(SegmentHeader) == 512 && alignof(SegmentHeader) == 8);
static_assert(offsetof(SegmentHeader, header_checksum) == 16);
static_assert(offsetof(SegmentHeader, first_token) == 48);
static_assert(offsetof(SegmentHeader, layer_count) == 64);
static_assert(offsetof(SegmentHeader, digest_count) == 96);
static_assert(offsetof(SegmentHeader, certificate_offset) == 104);
static_assert(offsetof(SegmentHeader, profile) == 120);
static_assert(offsetof(SegmentHeader, model_fingerprint) == 128);
static_assert(offsetof(SegmentHeader, rope_kind) == 224);
static_assert(offsetof(SegmentHeader, rope_theta) == 240);
static_assert(offsetof(SegmentHeader, reserved) == 256);
static_assert(sizeof(LayerRecord) == 256 && alignof(LayerRecord) == 8);
static_assert(offsetof(LayerRecord, block_bytes) == 32);
static_assert(offsetof(LayerRecord, payload_checksum) == 64);
static_assert(offsetof(LayerRecord, exact_k_offset) == 104);
static_assert(offsetof(LayerRecord, k_scale) == 152);
static_assert(offsetof(LayerRecord, reserved) == 172);
static_assert(sizeof(CertificateEntry) == 16);
// No hidden padding: an object whose every bit belongs to a field (floating point fields are
// checked by the offsets above).
static_assert(std::is_trivially_copyable_v<SegmentHeader> &&
              std::is_standard_layout_v<SegmentHeader>);
static_assert(std::is_trivially_copyable_v<LayerRecord> && std::is_standard_layout_v<LayerRecord>);

}  // namespace polykv
