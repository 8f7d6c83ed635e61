// What a kernel's body knows of the machine: one thread of one block of a grid, as CUDA has it.
// A kernel is a struct
//
//   struct SomeKernel {
//     static constexpr uint32_t kThreads = 128;   // of a block; whole warps
//     static constexpr uint32_t kMinBlocks = 4;   // of a multiprocessor: bounds the registers of a thread
//     struct Shared { ... };                      // a block's shared memory; trivial
//     struct Arguments { ... };                   // plain, by value
//     template <typename Thread>
//     POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& arguments);
//   };
//
// and a launcher (kernels/cuda/device_launcher.cuh) runs it for each thread of a grid:
// launcher.launch<SomeKernel>(block_count, arguments). There are two kinds of Thread: the one below,
// and that of the emulation in tests/cuda_emulation, which runs the same bodies without a GPU and
// checks how they use barriers.
//
// multiply_fragments: sums [16, 8] += A [16, 32] x B [32, 8], int8 and int32, the tensor cores' product (PTX: mma.m16n8k32). Of
// lane 4 i + s the words, four of the 32 each, are
//
//   a[0], a[2]   row i of A, columns 4 s to 4 s + 3, and 16 behind them     a[1], a[3]   the same of row i + 8
//   b0, b1       column i of B, rows 4 s to 4 s + 3, and 16 behind them
//   sums         row i, columns 2 s and 2 s + 1; then row i + 8
//
// Warp operations (shuffles, products of fragments, sync_warp) are for all 32 lanes of a warp at once, and
// sync_threads for all threads of the block; nobody may have left. Each barrier has a number that is
// its own in its kernel: tests take single ones away by it and expect a wrong result.
#pragma once

#include <cstdint>

#include "kernels/cuda/host_device.h"

namespace polykv::cuda {

inline constexpr uint32_t kWarpThreads = 32;

#ifdef __CUDACC__

class DeviceThread {
 public:
  __device__ uint32_t block_index() const { return blockIdx.x; }
  __device__ uint32_t thread_index() const { return threadIdx.x; }
  template <typename Shared>
  __device__ Shared& shared() const {
    __shared__ Shared memory;
    return memory;
  }
  __device__ void sync_threads(uint32_t) const { __syncthreads(); }
  __device__ void sync_warp(uint32_t) const { __syncwarp(); }
  template <typename T>
  __device__ T shuffle_xor(T value, uint32_t lane_mask) const {
    return __shfl_xor_sync(0xffffffffU, value, static_cast<int>(lane_mask));
  }
  __device__ void multiply_fragments(int32_t (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1) const {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

/// One block of Kernel::kThreads threads for each index of the grid.
template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kMinBlocks)
    run_kernel(const __grid_constant__ typename Kernel::Arguments arguments) {
  DeviceThread thread;
  Kernel::run(thread, arguments);
}

#endif

}  // namespace polykv::cuda
