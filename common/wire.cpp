#include "common/wire.h"

#include <cmath>

#include "common/packet_socket.h"

namespace polykv {

Result<const wire::Packet*> parse_packet(std::span<const uint8_t> bytes) {
  // A packet of 64 KiB holds far fewer tables than this; a crafted one must not buy us more work.
  constexpr unsigned kMaxDepth = 16;
  constexpr unsigned kMaxTables = 4096;
  flatbuffers::Verifier verifier(bytes.data(), bytes.size(), kMaxDepth, kMaxTables);
  if (!wire::VerifyPacketBuffer(verifier)) {
    return {POLYKV_ERR_PROTOCOL,
            format("read a packet of %zu bytes: it is malformed", bytes.size())};
  }
  const wire::Packet* packet = wire::GetPacket(bytes.data());
  if (packet->body_type() == wire::Body::NONE || packet->body() == nullptr ||
      packet->body_type() > wire::Body::MAX) {
    return {POLYKV_ERR_VERSION,
            format("read a packet: message type %u is unknown to protocol "
                   "version %u; update the older side",
                   static_cast<unsigned>(packet->body_type()), kProtocolVersion)};
  }
  return packet;
}

Digest from_wire(const wire::Digest& digest) {
  Digest result;
  const auto* bytes = digest.bytes();
  for (size_t i = 0; i < result.size(); ++i) result[i] = (*bytes)[static_cast<uint32_t>(i)];
  return result;
}

flatbuffers::Offset<wire::Model> to_wire(flatbuffers::FlatBufferBuilder& builder,
                                         const ModelIdentity& identity) {
  std::vector<wire::LayerGeometry> layers;
  layers.reserve(identity.layers.size());
  for (const LayerGeometry& layer : identity.layers) {
    layers.emplace_back(layer.kv_head_count, layer.k_head_dim, layer.v_head_dim,
                        layer.sliding_window);
  }
  const auto name = builder.CreateString(identity.name);
  const auto layer_vector = builder.CreateVectorOfStructs(layers);
  const wire::Digest fingerprint = to_wire(identity.fingerprint);
  return wire::CreateModel(
      builder, name, &fingerprint, static_cast<uint32_t>(identity.source_dtype),
      static_cast<uint32_t>(identity.rope.kind), static_cast<uint32_t>(identity.rope.scaling),
      identity.rope.rotary_dim, identity.rope.original_context, identity.rope.theta,
      identity.rope.scaling_factor, layer_vector);
}

Status check_identity(const ModelIdentity& identity) {
  const auto bad = [](const std::string& what) {
    return Status(POLYKV_ERR_INVALID_ARGUMENT, "check a model's identity: " + what);
  };
  if (!dtype_is_valid(static_cast<uint32_t>(identity.source_dtype)))
    return bad("its source dtype is unknown");
  const RopeParameters& rope = identity.rope;
  if (rope.kind > RopeKind::interleaved || rope.scaling > RopeScaling::llama3)
    return bad("its kind of RoPE is unknown");
  if (!std::isfinite(rope.theta) || !std::isfinite(rope.scaling_factor))
    return bad("a RoPE parameter is not finite");
  if (identity.layers.empty() || identity.layers.size() > kMaxLayers) {
    return bad(format("%zu layers; 1 to %u are allowed", identity.layers.size(), kMaxLayers));
  }
  for (size_t i = 0; i < identity.layers.size(); ++i) {
    const LayerGeometry& layer = identity.layers[i];
    const auto in_range = [](uint32_t value, uint32_t limit) {
      return value >= 1 && value <= limit;
    };
    if (!in_range(layer.kv_head_count, kMaxKvHeads) || !in_range(layer.k_head_dim, kMaxHeadDim) ||
        !in_range(layer.v_head_dim, kMaxHeadDim)) {
      return bad(format(
          "layer %zu has %u kv_heads of head_dim %u and %u; 1 to %u and 1 to %u are allowed", i,
          layer.kv_head_count, layer.k_head_dim, layer.v_head_dim, kMaxKvHeads, kMaxHeadDim));
    }
  }
  return Status::ok();
}

Result<ModelIdentity> from_wire(const wire::Model& model) {
  ModelIdentity identity;
  identity.name = text_or_empty(model.name());
  // It stands in listings and in JSON.
  if (!identity.name.empty())
    POLYKV_RETURN_IF_ERROR(check_name(identity.name).with_context("read a model's identity"));
  if (model.fingerprint() == nullptr) {
    return {POLYKV_ERR_INVALID_ARGUMENT, "read a model's identity: it has no fingerprint"};
  }
  identity.fingerprint = from_wire(*model.fingerprint());
  identity.source_dtype = static_cast<Dtype>(model.source_dtype());
  identity.rope = {static_cast<RopeKind>(model.rope_kind()),
                   static_cast<RopeScaling>(model.rope_scaling()),
                   model.rotary_dim(),
                   model.rope_theta(),
                   model.rope_scaling_factor(),
                   model.original_context()};
  if (model.layers() != nullptr) {
    for (const wire::LayerGeometry* layer : *model.layers()) {
      identity.layers.push_back({layer->kv_head_count(), layer->k_head_dim(), layer->v_head_dim(),
                                 layer->sliding_window()});
    }
  }
  POLYKV_RETURN_IF_ERROR(check_identity(identity));
  return identity;
}

Status check_name(std::string_view name) {
  const auto bad = [](const char* why) {
    return Status(POLYKV_ERR_INVALID_ARGUMENT, std::string("check a name: ") + why);
  };
  if (name.empty() || name.size() > 255) return bad("a name has 1 to 255 bytes");
  // Tools take a document's name or its digest in one argument.
  if (name.size() == 2 * sizeof(Digest) &&
      name.find_first_not_of("0123456789abcdef") == std::string_view::npos) {
    return bad("64 hexadecimal digits would be read as a digest; add another letter");
  }
  for (size_t i = 0; i < name.size();) {
    const auto byte = static_cast<uint8_t>(name[i]);
    if (byte < 0x20 || byte == 0x7f) return bad("control characters are not allowed in a name");
    const size_t length = byte < 0x80 ? 1 : byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
    bool valid = byte < 0x80 || (byte >= 0xc2 && byte <= 0xf4);
    // Overlong forms, surrogates and what lies beyond U+10FFFF show in the second byte.
    uint8_t lowest = byte == 0xe0 ? 0xa0 : byte == 0xf0 ? 0x90 : 0x80;
    uint8_t highest = byte == 0xed ? 0x9f : byte == 0xf4 ? 0x8f : 0xbf;
    for (size_t k = 1; k < length; ++k, lowest = 0x80, highest = 0xbf) {
      const auto next = i + k < name.size() ? static_cast<uint8_t>(name[i + k]) : uint8_t{0};
      valid = valid && next >= lowest && next <= highest;
    }
    if (!valid) return bad("a name is UTF-8");
    i += length;
  }
  return Status::ok();
}

}  // namespace polykv
