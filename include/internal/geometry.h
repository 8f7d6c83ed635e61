// What a KV cache looks like and which model made it: the geometry, the RoPE parameters and the
// identity of a model, shared by daemon, library and tools. Plain data, no ownership,
// thread-compatible.
//
// KV tensors are described everywhere as [layer, token, kv_head, head_dim]; K is stored after RoPE.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace polykv {

/// Element type of K, V and of decoded output. The numbers are part of segment format and wire.
enum class Dtype : uint32_t { f32 = 1, f16 = 2, bf16 = 3 };

constexpr size_t dtype_size_bytes(Dtype dtype) {
  return dtype == Dtype::f32 ? 4 : 2;
}
constexpr bool dtype_is_valid(uint32_t value) {
  return value >= 1 && value <= 3;
}
const char* dtype_name(Dtype dtype);  // "f32", "f16", "bf16"
std::optional<Dtype> dtype_from_name(std::string_view name);

/// Codec profiles. The numbers are part of segment format and wire; 0 means "any" in an acquire.
enum class Profile : uint32_t {
  any = 0,
  exact = 1,
  paper_k8v3 = 2,
  k8v8 = 3,
  k6v5 = 4,
  k5v4 = 5,
  k8v3 = 6,
  k4v3 = 7,
  automatic = 8,  // of documents only: each layer has one of those above
};
const char* profile_name(Profile profile);  // "exact", "paper-k8v3", "k8v8", ..., "auto", "unknown"
std::optional<Profile> profile_from_name(std::string_view name);

/// One layer of a KV cache. Layers may differ in everything.
struct LayerGeometry {
  uint32_t kv_head_count = 0;
  uint32_t k_head_dim = 0;
  uint32_t v_head_dim = 0;
  uint32_t sliding_window = 0;  // tokens; 0: the layer attends to everything
  bool operator==(const LayerGeometry&) const = default;
};

/// Limits that every reader of untrusted geometry applies before it computes a size.
inline constexpr uint32_t kMaxLayers = 1024;
inline constexpr uint32_t kMaxKvHeads = 1024;
inline constexpr uint32_t kMaxHeadDim = 1024;
inline constexpr uint64_t kMaxTokens = uint64_t{1} << 24;

enum class RopeKind : uint32_t { none = 0, half_rotation = 1, interleaved = 2 };
enum class RopeScaling : uint32_t { none = 0, linear = 1, yarn = 2, llama3 = 3 };

/// Everything about positions that changes K for the same tokens.
struct RopeParameters {
  RopeKind kind = RopeKind::none;
  RopeScaling scaling = RopeScaling::none;
  uint32_t rotary_dim = 0;
  double theta = 0;
  double scaling_factor = 1;
  uint32_t original_context = 0;  // tokens; 0 without scaling
  bool operator==(const RopeParameters&) const = default;
};

using Digest = std::array<uint8_t, 32>;  // BLAKE2b-256
std::string digest_hex(const Digest& digest);

/// The model as far as the KV cache depends on it. `name` is for people and not part of the
/// identity.
struct ModelIdentity {
  std::string name;
  Digest fingerprint{};             // BLAKE2b-256 over configuration and tensors
  Dtype source_dtype = Dtype::f32;  // in which K and V were computed
  RopeParameters rope;
  std::vector<LayerGeometry> layers;
};

}  // namespace polykv
