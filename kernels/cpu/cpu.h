// The CPU path: the same bytes as the reference, in loops that the compiler vectorises.
#pragma once

#include "kernels/codec.h"

namespace polykv::cpu {

const Codec& exact_codec();
const Codec& paper_k8v3_codec();
/// Of kernels/profiles.h; null for others.
const Codec* quantized_codec(Profile profile);

}  // namespace polykv::cpu
