// fp16 and bf16 in software: round to nearest, ties to even, subnormals kept. The CPU path uses the
// machine's instructions where it has them, with the same results.
#pragma once

#include <bit>
#include <cstdint>

namespace polykv {

constexpr uint16_t bf16_from_f32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U)
    return static_cast<uint16_t>((bits >> 16) | 0x40U);  // NaN stays one
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

constexpr float f32_from_bf16(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

constexpr float f32_from_f16(uint16_t value) {
  const uint32_t sign = (value & 0x8000U) << 16;
  const uint32_t magnitude = value & 0x7fffU;
  if (magnitude >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | (magnitude << 13));
  // Shifted into place the exponent is too small by 112; the multiplication mends that and
  // subnormals alike.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | sign);
}

constexpr uint16_t f16_from_f32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude >= 0x7f800000U) {
    return static_cast<uint16_t>(sign | (magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U));
  }
  if (magnitude >= 0x477ff000U)
    return static_cast<uint16_t>(sign | 0x7c00U);  // rounds beyond 65504
  if (magnitude < 0x38800000U) {
    // Subnormal: adding 0.5 leaves the result, rounded by the addition, in the low bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000U));
  }
  magnitude += 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000U) >> 13));
}

}  // namespace polykv
