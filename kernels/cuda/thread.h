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
// Warp operations (shuffles, ballot, sync_warp) are for all 32 lanes of a warp at once, and
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
