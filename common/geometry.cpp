#include "include/internal/geometry.h"

namespace polykv {

namespace {
struct DtypeName {
  Dtype dtype;
  const char* name;
};
constexpr DtypeName kDtypes[] = {{Dtype::f32, "f32"}, {Dtype::f16, "f16"}, {Dtype::bf16, "bf16"}};

struct ProfileName {
  Profile profile;
  const char* name;
};
constexpr ProfileName kProfiles[] = {
    {Profile::any, "any"},   {Profile::exact, "exact"}, {Profile::paper_k8v3, "paper-k8v3"},
    {Profile::k8v8, "k8v8"}, {Profile::k6v5, "k6v5"},   {Profile::k5v4, "k5v4"},
    {Profile::k8v3, "k8v3"}, {Profile::k4v3, "k4v3"},   {Profile::automatic, "auto"},
};
}  // namespace

const char* dtype_name(Dtype dtype) {
  for (const DtypeName& entry : kDtypes) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "unknown";
}

std::optional<Dtype> dtype_from_name(std::string_view name) {
  for (const DtypeName& entry : kDtypes) {
    if (name == entry.name) return entry.dtype;
  }
  return std::nullopt;
}

const char* profile_name(Profile profile) {
  for (const ProfileName& entry : kProfiles) {
    if (entry.profile == profile) return entry.name;
  }
  return "unknown";
}

std::optional<Profile> profile_from_name(std::string_view name) {
  for (const ProfileName& entry : kProfiles) {
    if (name == entry.name) return entry.profile;
  }
  return std::nullopt;
}

std::string digest_hex(const Digest& digest) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) {
    text += kHex[byte >> 4];
    text += kHex[byte & 15];
  }
  return text;
}

}  // namespace polykv
