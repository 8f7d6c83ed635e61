// The splits' partial results of a row as one: those of packed splits are added up, rotated back once and joined by those
// of rows that were not packed; of segments with different profiles, once with and once without turned signs. One thread block a row. The order of sums is always the same, so equal calls give equal
// bits.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_arguments.h"
#include "kernels/cuda/rotate_row.h"
#include "kernels/cuda/thread.h"

namespace polykv::cuda {

struct JoinSplitsArguments {
  AttendWorkspace workspace;
  // Splits whose outputs are rotated with turned signs, then those that are rotated; the rest are not.
  uint32_t turned_end;
  uint32_t rotated_end;
  uint32_t head_dim;  // of V
  TurnedSigns signs;
  uint32_t query_count;
  uint32_t head_count;
  void* output;  // [query, head, dim] under strides
  Dtype dtype;
  QueryStrides strides;
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

    constexpr uint32_t kThreadDims = kMaxDeviceHeadDim / kThreads;
    float outputs[kThreadDims];
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kThreadDims; ++i) {
      const uint32_t dim = thread + i * kThreads;
      outputs[i] = dim < a.head_dim
                       ? added(a, row, dim, maximum, a.rotated_end, a.workspace.split_count)
                       : 0.0F;
    }
    for (uint32_t pass = 0; pass < 2; ++pass) {
      const bool turned = pass == 0;
      const uint32_t first = turned ? 0 : a.turned_end;
      const uint32_t end = turned ? a.turned_end : a.rotated_end;
      if (first == end) continue;
      for (uint32_t dim = thread; dim < a.head_dim; dim += kThreads)
        values[dim] = added(a, row, dim, maximum, first, end);
      cuda.sync_threads(kAdded);
      if (thread < kWarpThreads) transform_row(cuda, values, a.head_dim, kPiecesDone, kTransformed);
      cuda.sync_threads(kRotated);
      POLYKV_UNROLL
      for (uint32_t i = 0; i < kThreadDims; ++i) {
        const uint32_t dim = thread + i * kThreads;
        if (dim >= a.head_dim) break;
        outputs[i] += turned && a.signs.turns(dim) ? -values[dim] : values[dim];
      }
    }
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kThreadDims; ++i) {
      const uint32_t dim = thread + i * kThreads;
      if (dim >= a.head_dim) break;
      store_element(a.output, a.dtype,
                    a.strides.query * (row % a.query_count) +
                        a.strides.head * (row / a.query_count) + a.strides.dim * dim,
                    maximum > -INFINITY ? outputs[i] / sum : 0.0F);
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
