#include "kernels/codec.h"

#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu_choice.h"
#include "kernels/reference/reference.h"

namespace polykv {

Backend active_backend() {
  return cpu_choice() == CpuChoice::reference ? Backend::reference : Backend::cpu;
}

const Codec* codec_for(Profile profile, Backend backend) {
  const bool is_reference = backend == Backend::reference;
  if (profile == Profile::exact) {
    return is_reference ? &reference::exact_codec() : &cpu::exact_codec();
  }
  if (profile == Profile::paper_k8v3) {
    return is_reference ? &reference::paper_k8v3_codec() : &cpu::paper_k8v3_codec();
  }
  return is_reference ? reference::quantized_codec(profile) : cpu::quantized_codec(profile);
}

Status check_profile(Profile profile, std::span<const LayerGeometry> layers) {
  if (profile == Profile::automatic) return Status::ok();
  POLYKV_ASSIGN_OR_RETURN(const Codec* codec, require_codec(profile));
  for (const LayerGeometry& layer : layers)
    POLYKV_RETURN_IF_ERROR(codec->check_geometry(profile, layer));
  return Status::ok();
}

bool is_single_segment(Profile profile) {
  const Codec* codec = codec_for(profile);
  return codec != nullptr && codec->single_segment_only;
}

bool is_shareable(Profile profile) {
  if (profile == Profile::automatic) return true;
  return codec_for(profile) != nullptr && !is_single_segment(profile);
}

std::span<const Profile> shareable_profiles() {
  static const std::vector<Profile> profiles = [] {
    std::vector<Profile> found;
    for (uint32_t number = 1; number <= static_cast<uint32_t>(Profile::automatic); ++number) {
      if (is_shareable(static_cast<Profile>(number))) found.push_back(static_cast<Profile>(number));
    }
    return found;
  }();
  return profiles;
}

Result<const Codec*> require_codec(Profile profile, Backend backend) {
  const Codec* codec = codec_for(profile, backend);
  if (codec == nullptr) {
    return {
        POLYKV_ERR_UNSUPPORTED,
        format("codec profile '%s' (%u) is not in this build; use k5v4, k6v5, k8v8, k8v3, k4v3, "
               "auto, exact or paper-k8v3",
               profile_name(profile), static_cast<uint32_t>(profile))};
  }
  return codec;
}

}  // namespace polykv
