// The tables of docs/segment-format.md against the structs.
#include <catch2/catch.hpp>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "include/internal/segment_format.h"

using namespace polykv;

namespace {

struct Field {
  std::string name;
  size_t offset;
  size_t size_bytes;
  bool operator==(const Field&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Field& field) {
  return out << field.offset << ' ' << field.size_bytes << ' ' << field.name;
}

/// Rows "| offset | bytes | field | ..." below each "## heading".
std::map<std::string, std::vector<Field>> documented() {
  std::ifstream file(std::string(POLYKV_SOURCE_DIR) + "/docs/segment-format.md");
  REQUIRE(file.good());
  std::map<std::string, std::vector<Field>> tables;
  std::string heading;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) heading = line.substr(3);
    unsigned offset = 0;
    unsigned size = 0;
    char name[64];
    if (std::sscanf(line.c_str(), "| %u | %u | %63s |", &offset, &size, name) == 3) {
      tables[heading].push_back({name, offset, size});
    }
  }
  return tables;
}

#define FIELD(Struct, name) \
  { #name, offsetof(Struct, name), sizeof(Struct::name) }
#define HEADER(name) FIELD(SegmentHeader, name)
#define LAYER(name) FIELD(LayerRecord, name)
#define ENTRY(name) FIELD(CertificateEntry, name)

const std::vector<Field> kHeader = {HEADER(magic),
                                    HEADER(format_version),
                                    HEADER(header_bytes),
                                    HEADER(header_checksum),
                                    HEADER(total_bytes),
                                    HEADER(data_offset),
                                    HEADER(data_bytes),
                                    HEADER(first_token),
                                    HEADER(token_count),
                                    HEADER(layer_count),
                                    HEADER(layer_record_bytes),
                                    HEADER(layer_table_offset),
                                    HEADER(token_ids_offset),
                                    HEADER(digests_offset),
                                    HEADER(digest_count),
                                    HEADER(flags),
                                    HEADER(certificate_offset),
                                    HEADER(certificate_entry_bytes),
                                    HEADER(certificate_count),
                                    HEADER(profile),
                                    HEADER(source_dtype),
                                    HEADER(model_fingerprint),
                                    HEADER(root_digest),
                                    HEADER(parent_digest),
                                    HEADER(rope_kind),
                                    HEADER(rope_scaling),
                                    HEADER(rope_rotary_dim),
                                    HEADER(rope_original_context),
                                    HEADER(rope_theta),
                                    HEADER(rope_scaling_factor),
                                    HEADER(reserved)};

const std::vector<Field> kLayer = {LAYER(kv_head_count),
                                   LAYER(k_head_dim),
                                   LAYER(v_head_dim),
                                   LAYER(sliding_window),
                                   LAYER(profile),
                                   LAYER(block_tokens),
                                   LAYER(exact_row_capacity),
                                   LAYER(exact_row_count),
                                   LAYER(block_bytes),
                                   LAYER(block_count),
                                   LAYER(payload_offset),
                                   LAYER(payload_bytes),
                                   LAYER(payload_checksum),
                                   LAYER(k_means_offset),
                                   LAYER(k_means_bytes),
                                   LAYER(exact_tokens_offset),
                                   LAYER(exact_tokens_bytes),
                                   LAYER(exact_k_offset),
                                   LAYER(exact_k_bytes),
                                   LAYER(exact_v_offset),
                                   LAYER(exact_v_bytes),
                                   LAYER(blocks_offset),
                                   LAYER(blocks_bytes),
                                   LAYER(k_scale),
                                   LAYER(k_gain_exponent),
                                   LAYER(v_gain_exponent),
                                   LAYER(exact_k_exponent),
                                   LAYER(exact_v_exponent),
                                   LAYER(reserved)};

const std::vector<Field> kEntry = {ENTRY(relative_error), ENTRY(query_count), ENTRY(reserved)};

/// Fields follow one another without a gap and end at the struct's end.
bool is_packed(const std::vector<Field>& fields, size_t size_bytes) {
  size_t end = 0;
  for (const Field& field : fields) {
    if (field.offset != end) return false;
    end += field.size_bytes;
  }
  return end == size_bytes;
}

}  // namespace

TEST_CASE("the documented segment format is the one in the structs") {
  const auto tables = documented();
  CHECK(tables.at("SegmentHeader") == kHeader);
  CHECK(tables.at("LayerRecord") == kLayer);
  CHECK(tables.at("CertificateEntry") == kEntry);
}

TEST_CASE("the structs of the segment format have no hidden padding") {
  CHECK(is_packed(kHeader, sizeof(SegmentHeader)));
  CHECK(is_packed(kLayer, sizeof(LayerRecord)));
  CHECK(is_packed(kEntry, sizeof(CertificateEntry)));
}
