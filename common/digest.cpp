#include "common/digest.h"

#include <sodium.h>

#include <bit>
#include <cassert>
#include <cstring>

namespace polykv {

static_assert(std::endian::native == std::endian::little, "polykv runs on little-endian machines");

struct Hasher::State {
  crypto_generichash_blake2b_state blake;
};

Hasher::Hasher() : state_(std::make_unique<State>()) {
  crypto_generichash_blake2b_init(&state_->blake, nullptr, 0, std::tuple_size_v<Digest>);
}
Hasher::~Hasher() = default;
Hasher::Hasher(Hasher&&) noexcept = default;
Hasher& Hasher::operator=(Hasher&&) noexcept = default;

Hasher& Hasher::update(std::span<const uint8_t> bytes) {
  assert(state_ && "update of a finished Hasher");
  crypto_generichash_blake2b_update(&state_->blake, bytes.data(), bytes.size());
  return *this;
}

Hasher& Hasher::update(std::string_view text) {
  update_u64(text.size());
  return update(std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

Hasher& Hasher::update_u32(uint32_t value) {
  return update(std::span(reinterpret_cast<const uint8_t*>(&value), sizeof value));
}

Hasher& Hasher::update_u64(uint64_t value) {
  return update(std::span(reinterpret_cast<const uint8_t*>(&value), sizeof value));
}

Hasher& Hasher::update_f64(double value) {
  return update_u64(std::bit_cast<uint64_t>(value));
}

Digest Hasher::finish() {
  assert(state_ && "a Hasher finishes once");
  Digest digest;
  crypto_generichash_blake2b_final(&state_->blake, digest.data(), digest.size());
  state_.reset();
  return digest;
}

Digest chain_root(const ModelIdentity& identity) {
  Hasher hasher;
  hasher.update("polykv root 1").update(std::span(identity.fingerprint));
  hasher.update_u32(static_cast<uint32_t>(identity.source_dtype));
  const RopeParameters& rope = identity.rope;
  hasher.update_u32(static_cast<uint32_t>(rope.kind))
      .update_u32(static_cast<uint32_t>(rope.scaling));
  hasher.update_u32(rope.rotary_dim).update_f64(rope.theta).update_f64(rope.scaling_factor);
  hasher.update_u32(rope.original_context);
  hasher.update_u64(identity.layers.size());
  for (const LayerGeometry& layer : identity.layers) {
    hasher.update_u32(layer.kv_head_count)
        .update_u32(layer.k_head_dim)
        .update_u32(layer.v_head_dim);
    hasher.update_u32(layer.sliding_window);
  }
  return hasher.finish();
}

Digest chain_next(const Digest& parent, std::span<const uint32_t> ids) {
  assert(!ids.empty() && ids.size() <= kChunkTokens);
  Hasher hasher;
  const bool full = ids.size() == kChunkTokens;
  hasher.update(full ? "polykv chunk 1" : "polykv tail 1").update(std::span(parent));
  if (!full) hasher.update_u32(static_cast<uint32_t>(ids.size()));
  hasher.update(std::span(reinterpret_cast<const uint8_t*>(ids.data()), ids.size_bytes()));
  return hasher.finish();
}

std::vector<Digest> chain_digests(const Digest& root, std::span<const uint32_t> ids) {
  std::vector<Digest> digests;
  digests.reserve((ids.size() + kChunkTokens - 1) / kChunkTokens);
  Digest parent = root;
  while (!ids.empty()) {
    const auto chunk = ids.first(std::min<size_t>(ids.size(), kChunkTokens));
    parent = chain_next(parent, chunk);
    digests.push_back(parent);
    ids = ids.subspan(chunk.size());
  }
  return digests;
}

}  // namespace polykv
