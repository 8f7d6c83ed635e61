// The rotation's Walsh-Hadamard transforms (kernels/codebooks.h) in two steps, each within one
// thread's registers: 16 dims side by side, of which every rotation block is a multiple, then the
// dims that lie 16 apart. Neither divides; the second gives the factor that does.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/host_device.h"

namespace polykv::cuda {

inline constexpr uint32_t kPieceSize = 16;
inline constexpr uint32_t kMaxPieces = 16;  // of a head_dim that the kernels take

/// Count: a power of two.
template <uint32_t Count, typename T>
POLYKV_HOST_DEVICE inline void hadamard(T* values) {
  POLYKV_UNROLL
  for (uint32_t half = 1; half < Count; half *= 2) {
    POLYKV_UNROLL
    for (uint32_t i = 0; i < Count; ++i) {
      if ((i & half) != 0) continue;
      const T a = values[i];
      const T b = values[i + half];
      values[i] = a + b;
      values[i + half] = a - b;
    }
  }
}

/// 1 / sqrt(16 pieces), pieces a power of two up to 16.
POLYKV_HOST_DEVICE constexpr float inverse_root(uint32_t pieces) {
  return pieces == 1   ? 0.25F
         : pieces == 2 ? 0.176776695F
         : pieces == 4 ? 0.125F
         : pieces == 8 ? 0.0883883476F
                       : 0.0625F;
}

/// values[i]: dim j of piece i. Transforms the blocks that the pieces make up, the largest first, and
/// makes them orthonormal.
template <uint32_t Pieces>
POLYKV_HOST_DEVICE inline void transform_pieces(float* values) {
  constexpr uint32_t kBlock = std::bit_floor(Pieces);
  hadamard<kBlock>(values);
  POLYKV_UNROLL
  for (uint32_t i = 0; i < kBlock; ++i) values[i] *= inverse_root(kBlock);
  if constexpr (Pieces > kBlock) transform_pieces<Pieces - kBlock>(values + kBlock);
}

/// The same for a number of pieces that is known only now; 1 to 16, the values beyond them stay.
POLYKV_HOST_DEVICE inline void transform_pieces(uint32_t pieces, float (&values)[kMaxPieces]) {
  switch (pieces) {
    case 1:
      return transform_pieces<1>(values);
    case 2:
      return transform_pieces<2>(values);
    case 3:
      return transform_pieces<3>(values);
    case 4:
      return transform_pieces<4>(values);
    case 5:
      return transform_pieces<5>(values);
    case 6:
      return transform_pieces<6>(values);
    case 7:
      return transform_pieces<7>(values);
    case 8:
      return transform_pieces<8>(values);
    case 9:
      return transform_pieces<9>(values);
    case 10:
      return transform_pieces<10>(values);
    case 11:
      return transform_pieces<11>(values);
    case 12:
      return transform_pieces<12>(values);
    case 13:
      return transform_pieces<13>(values);
    case 14:
      return transform_pieces<14>(values);
    case 15:
      return transform_pieces<15>(values);
    default:
      return transform_pieces<16>(values);
  }
}

/// Which dims' signs the rotation turns, a bit each.
struct TurnedSigns {
  uint32_t words[kPieceSize * kMaxPieces / 32];

  POLYKV_HOST_DEVICE bool turns(uint32_t dim) const {
    return ((words[dim / 32] >> (dim % 32)) & 1U) != 0;
  }
};

}  // namespace polykv::cuda
