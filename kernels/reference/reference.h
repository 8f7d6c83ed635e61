// Reference codecs: slow, obvious, in double, one element at a time. They define what the bytes
// mean; the fast paths are tested against them. POLYKV_CPU=reference runs them.
#pragma once

#include "kernels/codec.h"

namespace polykv::reference {

const Codec& exact_codec();
const Codec& paper_k8v3_codec();
/// Of kernels/profiles.h; null for others.
const Codec* quantized_codec(Profile profile);

}  // namespace polykv::reference
