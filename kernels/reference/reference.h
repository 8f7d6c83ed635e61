// Reference codecs: slow, obvious, in double, one element at a time. They define what the bytes
// mean; the fast paths are tested against them. POLYKV_CPU=reference runs them.
#pragma once

#include "kernels/block_layout.h"
#include "kernels/codec.h"
#include "kernels/reference/elements.h"

namespace polykv::reference {

const Codec& exact_codec();
const Codec& paper_k8v3_codec();
/// Of kernels/profiles.h; null for others.
const Codec* quantized_codec(Profile profile);

/// K's or V's rows of a range, all but the exact ones.
using DecodeTensor = void (*)(const LayerView& layer, const TensorPart& part, const float* means,
                              int32_t exponent, const DecodeTarget& range,
                              const TargetTensor& target);
/// What decoding a quantised layer is, whoever decodes the rows: of K and V those that are wanted,
/// with the exact rows over them.
void decode_quantized(const LayerView& layer, const DecodeTarget& target,
                      DecodeTensor decode_tensor);

}  // namespace polykv::reference
