// Gains and norms of a block, from fp16 with the layer's exponent to fp32 and back.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "include/internal/segment_format.h"
#include "kernels/cpu/ops.h"

namespace polykv::cpu {

/// gains[64] = fp16 * 2^exponent.
inline void load_gains(const uint8_t* source, int32_t exponent, float* gains) {
  uint16_t halves[kBlockTokens];
  std::memcpy(halves, source, sizeof halves);
  ops().f32_from_f16(halves, gains, kBlockTokens);
  const float scale = std::ldexp(1.0F, exponent);
  for (uint32_t i = 0; i < kBlockTokens; ++i) gains[i] *= scale;
}

inline uint32_t block_rows(uint64_t token_count, uint64_t block) {
  const uint64_t left = token_count - block * kBlockTokens;
  return left < kBlockTokens ? static_cast<uint32_t>(left) : kBlockTokens;
}

}  // namespace polykv::cpu
