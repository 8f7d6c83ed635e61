#include "kernels/codec.h"

#include <cstdlib>
#include <string_view>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/reference/reference.h"

namespace polykv {

namespace {
struct Row {
  const Codec* reference;
  const Codec* cpu;
};
}  // namespace

Backend active_backend() {
  static const Backend backend = [] {
    const char* choice = std::getenv("POLYKV_CPU");
    return choice != nullptr && std::string_view(choice) == "reference" ? Backend::reference
                                                                        : Backend::cpu;
  }();
  return backend;
}

const Codec* codec_for(Profile profile, Backend backend) {
  static const Row kRows[] = {
      {&reference::exact_codec(), &cpu::exact_codec()},
      {&reference::paper_k8v3_codec(), &cpu::paper_k8v3_codec()},
      {&reference::k8v8_codec(), &cpu::k8v8_codec()},
  };
  for (const Row& row : kRows) {
    if (row.reference->profile == profile) {
      return backend == Backend::reference ? row.reference : row.cpu;
    }
  }
  return nullptr;
}

bool is_shareable(Profile profile) {
  const Codec* codec = codec_for(profile);
  return codec != nullptr && !codec->single_segment_only;
}

std::span<const Profile> shareable_profiles() {
  static const std::vector<Profile> profiles = [] {
    std::vector<Profile> found;
    for (uint32_t number = 1; number <= static_cast<uint32_t>(Profile::k4v3); ++number) {
      if (is_shareable(static_cast<Profile>(number))) found.push_back(static_cast<Profile>(number));
    }
    return found;
  }();
  return profiles;
}

Result<const Codec*> require_codec(Profile profile, Backend backend) {
  const Codec* codec = codec_for(profile, backend);
  if (codec == nullptr) {
    return {POLYKV_ERR_UNSUPPORTED,
            format("codec profile '%s' (%u) is not in this build; use exact, k8v8 or paper-k8v3",
                   profile_name(profile), static_cast<uint32_t>(profile))};
  }
  return codec;
}

}  // namespace polykv
