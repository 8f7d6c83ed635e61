// The rules of the format that the reference and the fast paths share: which geometry a codec
// holds, its block sizes, its codebook, how gains are chosen. Internal to kernels/.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/result.h"
#include "include/internal/geometry.h"
#include "kernels/codec.h"
#include "kernels/half.h"

namespace polykv {

Status check_exact_geometry(Profile profile, const LayerGeometry& geometry);
Status check_paper_geometry(Profile profile, const LayerGeometry& geometry);
uint64_t exact_block_bytes(Profile profile, const LayerGeometry& geometry, Dtype source_dtype);
uint64_t paper_block_bytes(Profile profile, const LayerGeometry& geometry, Dtype source_dtype);

/// The codecs of kernels/profiles.h, with one implementation for all.
std::vector<Codec> quantized_codecs(decltype(Codec::encode) encode, decltype(Codec::decode) decode);
/// Null when it is not among them.
const Codec* find_codec(const std::vector<Codec>& codecs, Profile profile);

/// "K of token 17, kv_head 2 is nan: ..."
Status bad_value(bool is_k, uint64_t token, uint32_t kv_head, double value, const char* rule);
inline constexpr char kLossyRule[] = "values must be finite and at most 2^120";

/// Nearest values to a unit Gaussian at 3 bits, as paper-k8v3 fixes them; and the boundaries
/// between them.
inline constexpr std::array<float, 8> kPaperCodebook = {-2.152F, -1.344F, -0.756F, -0.245F,
                                                        0.245F,  0.756F,  1.344F,  2.152F};
inline constexpr std::array<float, 7> kPaperBoundaries = {-1.748F, -1.05F, -0.5005F, 0.0F,
                                                          0.5005F, 1.05F,  1.748F};
/// The published implementation's floors: of the K scale, and of a V norm before it divides by it.
inline constexpr float kPaperFloor = 1e-8F;

/// The power of two that brings the layer's largest gain, norm or exact value into fp16's [2^14,
/// 2^15): a row then keeps fp16's full precision down to 2^-28 of the largest. 0 for a layer of
/// zeros.
inline int32_t scale_exponent(double largest) {
  if (largest == 0) return 0;
  return std::max(-126, std::ilogb(largest) - 14);
}

/// fp16 of value * 2^-exponent, value >= 0.
inline uint16_t scaled_f16(double value, int32_t exponent) {
  return f16_from_f32(static_cast<float>(std::ldexp(value, -exponent)));
}
inline float from_scaled_f16(uint16_t value, int32_t exponent) {
  return std::ldexp(f32_from_f16(value), exponent);
}

/// Gain of an int8 row: the fp16 next to largest / 127, and the one above where that would put the
/// largest value beyond code 127.5 (only among subnormals).
inline uint16_t int8_gain(float largest, int32_t exponent) {
  const double wanted = largest / 127.0;
  uint16_t gain = scaled_f16(wanted, exponent);
  if (f32_from_f16(gain) * 127.5 < std::ldexp(static_cast<double>(largest), -exponent)) ++gain;
  return gain;
}

}  // namespace polykv
