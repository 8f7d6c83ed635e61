// From the codes of a block, a byte each, to its packed words (kernels/block_layout.h): the counterpart of
// kernels/cuda/unpack.h. A thread makes a word, whose bytes nobody else touches.
#pragma once

#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/cuda/host_device.h"

namespace polykv::cuda {

/// Codes of 64 tokens, codes[token * pitch + dim]; of absent tokens zero. Of 8 bits: the bytes that
/// are stored.
struct CodeTile {
  const uint8_t* codes;
  uint32_t pitch;
  uint32_t head_dim;
  uint32_t bits;

  POLYKV_HOST_DEVICE uint32_t at(uint32_t token, uint32_t dim) const {
    return codes[token * pitch + dim];
  }
  POLYKV_HOST_DEVICE uint32_t word_count() const { return kBlockTokens * bits * head_dim / 32; }
};

/// Word `index` of K's codes.
POLYKV_HOST_DEVICE inline uint32_t k_word(const CodeTile& tile, uint32_t index) {
  uint32_t word = 0;
  if (tile.bits == 8) {
    for (uint32_t byte = 0; byte < 4; ++byte)
      word |= tile.at(index % kBlockTokens, index / kBlockTokens * 4 + byte) << (8 * byte);
    return word;
  }
  constexpr uint32_t kLineTokens = kPieceLineBytes / 4;
  const uint32_t line = index / kLineTokens % tile.bits;
  const uint32_t piece = index / kLineTokens / tile.bits;
  const uint32_t pieces = tile.head_dim / kPieceDims;
  const uint32_t token = piece / pieces * kPieceTokens + index % kLineTokens;
  const uint32_t dim = piece % pieces * kPieceDims;
  for (uint32_t byte = 0; byte < 4; ++byte) {
    uint32_t bits = 0;
    if (line < kPieceLowLines) {
      const uint32_t at = token + line / 2 * kLineTokens;
      const uint32_t first = dim + line % 2 * 8 + byte;
      bits = (tile.at(at, first) & 15U) | (tile.at(at, first + 4) & 15U) << 4;
    } else if (tile.bits == 5) {
      for (uint32_t bit = 0; bit < 8; ++bit)
        bits |= tile.at(token + bit / 4 * kLineTokens, dim + bit % 4 * 4 + byte) >> 4 << bit;
    } else {
      const uint32_t at = token + (line - kPieceLowLines) * kLineTokens;
      for (uint32_t quad = 0; quad < 4; ++quad)
        bits |= tile.at(at, dim + quad * 4 + byte) >> 4 << (2 * quad);
    }
    word |= bits << (8 * byte);
  }
  return word;
}

/// Word `index` of V's codes.
POLYKV_HOST_DEVICE inline uint32_t v_word(const CodeTile& tile, uint32_t index) {
  const uint32_t dim = index % tile.head_dim;
  const uint32_t row = index / tile.head_dim;  // a quad of 8 bits, or a plane of a group
  uint32_t word = 0;
  for (uint32_t lane = 0; lane < 4; ++lane) {
    const uint32_t lane_token = (lane % 2 * 2 + lane / 2) * kTokenQuads;
    uint32_t bits = 0;
    if (tile.bits == 8) {
      bits = tile.at(lane_token + row, dim);
    } else {
      const uint32_t first = lane_token + row / tile.bits * kGroupQuads;
      const uint32_t plane = row % tile.bits;
      if (plane < 4)
        bits = (tile.at(first + 2 * plane, dim) & 15U) | (tile.at(first + 2 * plane + 1, dim) & 15U)
                                                             << 4;
      if (tile.bits == 3) {
        bits |= (tile.at(first + 6, dim) >> plane & 1U) << 3 |
                (tile.at(first + 7, dim) >> plane & 1U) << 7;
      } else if (plane == 4) {
        for (uint32_t bit = 0; bit < kGroupQuads; ++bit)
          bits |= tile.at(first + bit, dim) >> 4 << bit;
      }
    }
    word |= bits << (8 * lane);
  }
  return word;
}

}  // namespace polykv::cuda
