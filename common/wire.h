// Packets as flatbuffers: build with make_packet, take apart with parse_packet. Pure functions.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "common/result.h"
#include "include/internal/geometry.h"
#include "internal/protocol_generated.h"

namespace polykv {

/// Finishes the packet {request_id, body} of a builder whose last table is `body`; the bytes are
/// owned by the result.
template <typename Table>
std::vector<uint8_t> make_packet(flatbuffers::FlatBufferBuilder& builder, uint64_t request_id,
                                 flatbuffers::Offset<Table> body) {
  builder.Finish(
      wire::CreatePacket(builder, request_id, wire::BodyTraits<Table>::enum_value, body.Union()));
  return {builder.GetBufferPointer(), builder.GetBufferPointer() + builder.GetSize()};
}

/// The packet within bytes, which must outlive it. ERR_PROTOCOL unless the flatbuffers verifier
/// accepts all of it (depth, number of tables, every offset and length); ERR_VERSION when its body
/// is of no type that this protocol version knows.
Result<const wire::Packet*> parse_packet(std::span<const uint8_t> bytes);

inline wire::Digest to_wire(const Digest& digest) {
  return wire::Digest(flatbuffers::span<const uint8_t, 32>(digest.data(), digest.size()));
}
Digest from_wire(const wire::Digest& digest);

flatbuffers::Offset<wire::Model> to_wire(flatbuffers::FlatBufferBuilder& builder,
                                         const ModelIdentity& identity);
/// Checks every enumeration and limit (kMaxLayers, kMaxKvHeads, kMaxHeadDim; at least one layer;
/// finite numbers).
Result<ModelIdentity> from_wire(const wire::Model& model);

inline std::string_view text_or_empty(const flatbuffers::String* text) {
  return text == nullptr ? std::string_view() : std::string_view(text->c_str(), text->size());
}

/// Checks a ModelIdentity from anywhere untrusted, as from_wire does.
Status check_identity(const ModelIdentity& identity);

/// A document's or model's name: 1 to 255 bytes of UTF-8 without control characters.
/// ERR_INVALID_ARGUMENT says why not.
Status check_name(std::string_view name);

}  // namespace polykv
