// Queues kernels on a stream of the CUDA runtime. Only for nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include "common/result.h"
#include "kernels/cuda/thread.h"

namespace polykv::cuda {

/// Remembers the first failure.
class DeviceLauncher {
 public:
  explicit DeviceLauncher(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  template <typename Kernel>
  void launch(uint64_t block_count, const typename Kernel::Arguments& arguments) {
    if (error_ != cudaSuccess) return;
    run_kernel<Kernel>
        <<<static_cast<uint32_t>(block_count), Kernel::kThreads, 0, stream_>>>(arguments);
    error_ = cudaGetLastError();
  }
  Status status() const {
    if (error_ == cudaSuccess) return Status::ok();
    // An error that a kernel before left behind comes here as well.
    const bool is_refused =
        error_ == cudaErrorInvalidConfiguration || error_ == cudaErrorLaunchOutOfResources ||
        error_ == cudaErrorNoKernelImageForDevice || error_ == cudaErrorUnsupportedPtxVersion;
    return {is_refused ? POLYKV_ERR_SYSTEM : POLYKV_ERR_DEVICE_LOST,
            format("launch a kernel on the device: %s; see polykvctl doctor",
                   cudaGetErrorString(error_))};
  }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace polykv::cuda
