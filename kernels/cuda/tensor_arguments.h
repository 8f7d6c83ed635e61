// What kernels are told about a layer, by value: K or V of it, and its exact rows. Made on the host
// from a LayerView whose pointers are the device's.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/codebooks.h"
#include "kernels/codec.h"
#include "kernels/codec_rules.h"
#include "kernels/cuda/hadamard.h"
#include "kernels/cuda/unpack.h"
#include "kernels/profiles.h"

namespace polykv::cuda {

/// The largest head_dim of K and V that the kernels take.
inline constexpr uint32_t kMaxDeviceHeadDim = kPieceSize * kMaxPieces;

inline constexpr uint32_t kNoGains = 0xffffffffU;

/// K's or V's codes in the blocks of a layer.
struct PackedTensor {
  const uint8_t* blocks;  // [kv_head, block]
  uint64_t block_bytes;
  uint64_t block_count;  // of one kv_head
  uint32_t codes;        // offsets in a block
  uint32_t gains;        // fp16 [64], or kNoGains
  uint32_t bits;
  uint32_t head_dim;
  bool is_k;
  bool is_rotated;
  float gain_unit;     // what gains are multiplied by; without gains, what levels are
  const float* means;  // [kv_head, head_dim]; null: none
  TurnedSigns signs;   // all zero: none turns
  LevelTable levels;

  POLYKV_HOST_DEVICE const uint8_t* block(uint32_t kv_head, uint64_t index) const {
    return blocks + (kv_head * block_count + index) * block_bytes;
  }
  /// Of token slot 0 to 63 of a block.
  POLYKV_HOST_DEVICE float gain(const uint8_t* block, uint32_t slot) const {
    if (gains == kNoGains) return gain_unit;
    return from_f16(reinterpret_cast<const uint16_t*>(block + gains)[slot]) * gain_unit;
  }
};

/// K's or V's exact rows of a layer.
struct ExactRows {
  const uint32_t* tokens;  // [count], counted from the segment's first
  const uint16_t* rows;    // fp16 [kv_head, capacity, head_dim]
  uint32_t count;
  uint32_t capacity;
  float unit;  // what the fp16 numbers are multiplied by

  POLYKV_HOST_DEVICE const uint16_t* row(uint32_t kv_head, uint32_t index,
                                         uint32_t head_dim) const {
    return rows + (uint64_t{kv_head} * capacity + index) * head_dim;
  }
};

inline TurnedSigns turned_signs(const TensorRule& rule) {
  TurnedSigns signs{};
  if (!rule.rotated || !rule.turns_signs) return signs;
  for (uint32_t dim = 0; dim < kMaxDeviceHeadDim; ++dim) {
    if (rotation_turns(dim)) signs.words[dim / 32] |= 1U << (dim % 32);
  }
  return signs;
}

/// What a code of paper-k8v3's V means, times a row's norm, before an orthonormal transform; the format's is not.
inline float paper_level(uint32_t code, uint32_t v_head_dim) {
  return kPaperCodebook[code] / std::sqrt(static_cast<float>(v_head_dim));
}

/// Of a quantised profile.
inline PackedTensor packed_tensor(const LayerView& layer, const TensorPart& part) {
  PackedTensor tensor{};
  tensor.blocks = layer.blocks;
  tensor.block_bytes = layer.block_bytes;
  tensor.block_count = layer.block_count;
  tensor.codes = static_cast<uint32_t>(part.codes);
  tensor.gains = static_cast<uint32_t>(part.gains);
  tensor.bits = part.rule.bits;
  tensor.head_dim = part.head_dim;
  tensor.is_k = part.is_k;
  tensor.is_rotated = part.rule.rotated;
  tensor.gain_unit =
      std::ldexp(1.0F, part.is_k ? layer.scales.k_gain_exponent : layer.scales.v_gain_exponent);
  tensor.means = part.is_k ? layer.k_means : nullptr;
  tensor.signs = turned_signs(part.rule);
  tensor.levels = level_table(part.rule.bits);
  return tensor;
}

inline ExactRows exact_rows(const LayerView& layer, bool is_k) {
  return {layer.exact_tokens, is_k ? layer.exact_k : layer.exact_v, layer.exact_row_count,
          layer.exact_row_capacity,
          std::ldexp(1.0F, is_k ? layer.scales.exact_k_exponent : layer.scales.exact_v_exponent)};
}

}  // namespace polykv::cuda
