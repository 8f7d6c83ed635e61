#include "daemon/document_wire.h"

namespace polykv::daemon {

flatbuffers::Offset<wire::DocumentInfo> document_info(flatbuffers::FlatBufferBuilder& builder,
                                                      const Document& document,
                                                      const std::string& backing) {
  const std::vector<std::string> names(document.names.begin(), document.names.end());
  const auto wire_names = builder.CreateVectorOfStrings(names);
  const auto model = to_wire(builder, *document.identity);
  const auto state = builder.CreateString(
      document_state_name(document.is_view ? DocumentState::sealed : document.state));
  const wire::Digest digest = to_wire(document.key.digest);
  std::vector<wire::LayerQuality> qualities;
  for (const LayerQuality& layer : document.layers())
    qualities.emplace_back(layer.profiles, layer.query_count, layer.relative_error);
  const auto layers = builder.CreateVectorOfStructs(qualities);
  const auto wire_backing = builder.CreateString(backing);
  wire::DocumentInfoBuilder info(builder);
  info.add_names(wire_names);
  info.add_digest(&digest);
  info.add_model(model);
  info.add_profile(static_cast<uint32_t>(document.key.profile));
  info.add_token_count(document.tokens->size());
  info.add_segment_count(static_cast<uint32_t>(document.parts.size()));
  info.add_stored_bytes(document.stored_bytes());
  info.add_bf16_bytes(document.bf16_bytes());
  info.add_lease_count(document.lease_count);
  info.add_state(state);
  info.add_created_unix_ms(document.created_unix_ms);
  info.add_is_public(document.key.domain == kPublicDomain);
  info.add_sealed_token_count(document.end_token());
  info.add_shared_bytes(document.shared_bytes());
  info.add_prefix_treatment(static_cast<uint32_t>(document.prefix_treatment()));
  info.add_layers(layers);
  info.add_backing(wire_backing);
  return info.Finish();
}

wire::DeviceMemory to_wire(const DeviceMemory& memory, uint64_t epoch) {
  return {
      flatbuffers::span<const uint8_t, 64>(memory.handle.data(), memory.handle.size()),
      flatbuffers::span<const uint8_t, 16>(memory.device_uuid.data(), memory.device_uuid.size()),
      memory.size_bytes, epoch};
}

}  // namespace polykv::daemon
