// Once a call: queries are rotated as the keys were and become fixed-point numbers of two int8 terms,
// in the order in which keys' levels come out of their codes (kernels/cuda/unpack.h); each part's mean
// of the keys gets its logit. A warp a row.
//
// Fixed point: a query's own rounding is 2^-16 of its largest rotated value.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_arguments.h"
#include "kernels/cuda/rotate_row.h"
#include "kernels/cuda/thread.h"

namespace polykv::cuda {

struct PrepareQueriesArguments {
  AskedRows asked;
  uint32_t row_count;
  uint32_t group_rows;
  uint32_t head_dim;
  uint32_t bits;  // of K's codes; 8: not rotated
  TurnedSigns signs;
  AttendWorkspace workspace;
  uint32_t part_count;
  const float* means[kMaxParts];  // of each part
  uint32_t first_part;            // in the workspace
};

struct PrepareQueriesKernel {
  using Arguments = PrepareQueriesArguments;
  static constexpr uint32_t kWarps = 4;
  static constexpr uint32_t kThreads = kWarps * kWarpThreads;
  static constexpr uint32_t kMinBlocks = 8;
  enum Sync : uint32_t { kLoaded = 1, kPiecesDone, kRotated };
  struct Shared {
    float rows[kWarps][kMaxDeviceHeadDim];
  };

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    const uint32_t warp = cuda.thread_index() / kWarpThreads;
    const uint32_t lane = cuda.thread_index() % kWarpThreads;
    const auto row = static_cast<uint32_t>(cuda.block_index() * kWarps + warp);
    if (row >= a.row_count) return;  // a whole warp
    float* values = cuda.template shared<Shared>().rows[warp];
    float largest = 0;
    for (uint32_t dim = lane; dim < a.head_dim; dim += kWarpThreads) {
      values[dim] = a.asked.at(row, dim);
      largest = fmaxf(largest, fabsf(values[dim]));
    }
    put_mean_logits(cuda, a, row, lane, values);
    // A power of two keeps the rotation and the step within fp32.
    largest = warp_maximum(cuda, largest);
    int exponent = 0;
    if (largest > 0) frexpf(largest, &exponent);
    for (uint32_t dim = lane; dim < a.head_dim; dim += kWarpThreads) {
      const float value = ldexpf(values[dim], -exponent);
      values[dim] = a.signs.turns(dim) ? -value : value;
    }
    cuda.sync_warp(kLoaded);
    if (a.bits != 8) transform_row(cuda, values, a.head_dim, kPiecesDone, kRotated);
    put_words(cuda, a, row, lane, values, exponent);
  }

 private:
  /// Each lane has its own dims, which are still as they came.
  template <typename Thread>
  POLYKV_HOST_DEVICE static void put_mean_logits(Thread& cuda, const Arguments& a, uint32_t row,
                                                 uint32_t lane, const float* values) {
    for (uint32_t part = 0; part < a.part_count; ++part) {
      const float* means = a.means[part] + uint64_t{row / a.group_rows} * a.head_dim;
      float logit = 0;
      for (uint32_t dim = lane; dim < a.head_dim; dim += kWarpThreads)
        logit += values[dim] * means[dim];
      logit = warp_sum(cuda, logit);
      if (lane == 0)
        a.workspace.mean_logits[uint64_t{a.first_part + part} * a.row_count + row] = logit;
    }
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static void put_words(Thread& cuda, const Arguments& a, uint32_t row,
                                           uint32_t lane, const float* values, int exponent) {
    float largest = 0;
    for (uint32_t dim = lane; dim < a.head_dim; dim += kWarpThreads)
      largest = fmaxf(largest, fabsf(values[dim]));
    largest = warp_maximum(cuda, largest);
    const float factor = largest > 0 ? kFixedPointLimit / largest : 0.0F;
    const uint32_t word_count = a.head_dim / 4;
    uint32_t* words = a.workspace.words + uint64_t{row} * word_count * 2;
    for (uint32_t word = lane; word < word_count; word += kWarpThreads) {
      uint32_t high = 0;
      uint32_t low = 0;
      for (uint32_t byte = 0; byte < 4; ++byte) {
        const uint32_t dim =
            a.bits == 8 ? word * 4 + byte : word / 2 * 8 + interleaved_dim(word % 2, byte);
        const auto number = static_cast<int32_t>(rintf(values[dim] * factor));
        high |= (static_cast<uint32_t>((number + 128) >> 8) & 0xffU) << (8 * byte);
        low |= (static_cast<uint32_t>(number) & 0xffU) << (8 * byte);
      }
      words[2 * word] = high;
      words[2 * word + 1] = low;
    }
    if (lane == 0) a.workspace.rows[row] = {ldexpf(largest / kFixedPointLimit, exponent)};
  }
};

}  // namespace polykv::cuda
