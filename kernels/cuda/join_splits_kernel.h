// The splits' partial results of a row as one: those of packed splits are added up, rotated back once and joined by those
// of rows that were not packed. One thread block a row. The order of sums is always the same, so equal calls give equal
// bits.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_arguments.h"
#include "kernels/cuda/rotate_row.h"
#include "kernels/cuda/thread.h"

namespace polykv::cuda {

struct JoinSplitsArguments {
  AttendWorkspace workspace;
  uint32_t packed_count;  // splits; the rest are plain
  uint32_t head_dim;      // of V
  bool is_rotated;
  TurnedSigns signs;
  uint32_t query_count;
  uint32_t head_count;
  // [query, head, dim] under strides
  void* output;
  Dtype dtype;
  int64_t query_stride;
  int64_t head_stride;
  int64_t dim_stride;
  float* log_sum_exp;  // [query, head]; null: not wanted
};

struct JoinSplitsKernel {
  using Arguments = JoinSplitsArguments;
  static constexpr uint32_t kThreads = 128;
  static constexpr uint32_t kMinBlocks = 8;
  enum Sync : uint32_t { kAdded = 1, kPiecesDone, kTransformed, kRotated };
  struct Shared {
    float row[kMaxDeviceHeadDim];
  };

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    const auto row = static_cast<uint32_t>(cuda.block_index());
    const uint32_t thread = cuda.thread_index();
    float* values = cuda.template shared<Shared>().row;
    const SplitState* states = a.workspace.states + a.workspace.place(row, 0);
    float maximum = -INFINITY;
    for (uint32_t split = 0; split < a.workspace.split_count; ++split)
      maximum = fmaxf(maximum, states[split].maximum);
    float sum = 0;
    for (uint32_t split = 0; split < a.workspace.split_count; ++split)
      sum += states[split].sum * weight(states[split], maximum);

    for (uint32_t dim = thread; dim < a.head_dim; dim += kThreads)
      values[dim] = added(a, row, dim, maximum, 0, a.packed_count);
    cuda.sync_threads(kAdded);
    if (a.is_rotated && thread < kWarpThreads)
      transform_row(cuda, values, a.head_dim, kPiecesDone, kTransformed);
    cuda.sync_threads(kRotated);
    for (uint32_t dim = thread; dim < a.head_dim; dim += kThreads) {
      const float packed = a.signs.turns(dim) ? -values[dim] : values[dim];
      const float output =
          packed + added(a, row, dim, maximum, a.packed_count, a.workspace.split_count);
      store_element(a.output, a.dtype,
                    a.query_stride * (row % a.query_count) + a.head_stride * (row / a.query_count) +
                        a.dim_stride * dim,
                    maximum > -INFINITY ? output / sum : 0.0F);
    }
    if (thread == 0 && a.log_sum_exp != nullptr) {
      a.log_sum_exp[uint64_t{row % a.query_count} * a.head_count + row / a.query_count] =
          maximum > -INFINITY ? maximum + logf(sum) : -INFINITY;
    }
  }

 private:
  POLYKV_HOST_DEVICE static float weight(const SplitState& state, float maximum) {
    return state.maximum > -INFINITY ? exp_of(state.maximum - maximum) : 0.0F;
  }

  POLYKV_HOST_DEVICE static float added(const Arguments& a, uint32_t row, uint32_t dim,
                                        float maximum, uint32_t first, uint32_t end) {
    float value = 0;
    for (uint32_t split = first; split < end; ++split) {
      const uint64_t place = a.workspace.place(row, split);
      value += a.workspace.outputs[place * a.head_dim + dim] *
               weight(a.workspace.states[place], maximum);
    }
    return value;
  }
};

}  // namespace polykv::cuda
