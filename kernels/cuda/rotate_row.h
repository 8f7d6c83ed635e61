// The rotation of one row by one warp, in shared memory: queries and keys on their way in, outputs on
// their way back.
#pragma once

#include <cstdint>

#include "kernels/cuda/hadamard.h"

namespace polykv::cuda {

/// Transforms values[head_dim], without signs. The lanes have written them and synchronised; when it
/// returns they may read all of them. The two numbers are those of its barriers.
template <typename Thread>
POLYKV_HOST_DEVICE inline void transform_row(Thread& cuda, float* values, uint32_t head_dim,
                                             uint32_t pieces_sync, uint32_t done_sync) {
  const uint32_t lane = cuda.thread_index() % 32;
  const uint32_t pieces = head_dim / kPieceSize;
  if (lane < pieces) {
    float piece[kPieceSize];
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kPieceSize; ++i) piece[i] = values[lane * kPieceSize + i];
    hadamard<kPieceSize>(piece);
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kPieceSize; ++i) values[lane * kPieceSize + i] = piece[i];
  }
  cuda.sync_warp(pieces_sync);
  if (lane < kPieceSize) {
    float column[kMaxPieces];
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kMaxPieces; ++i)
      column[i] = i < pieces ? values[i * kPieceSize + lane] : 0.0F;
    transform_pieces(pieces, column);
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kMaxPieces; ++i) {
      if (i < pieces) values[i * kPieceSize + lane] = column[i];
    }
  }
  cuda.sync_warp(done_sync);
}

}  // namespace polykv::cuda
