// The GPU as libtorch knows it. This program links no CUDA: pip's torch has what computes on a GPU in a library of its own,
// libtorch_cuda.so beside libtorch_cpu.so, which is loaded here where it is there. So one program serves both, and Debian's
// libtorch, which has none, is told apart at run time. Parsed as C++17 too, and free of torch's types.
#pragma once

#include "common/result.h"

namespace polykv {

/// Where tensors are.
struct TorchDevice {
  bool is_cuda = true;  // false: host memory, in tests alone
  int index = 0;        // CUDA's number in this process
};

/// Loads libtorch_cuda, for good. POLYKV_ERR_UNSUPPORTED says why it cannot be. Tests link others of both functions, whose
/// device is host memory.
Status load_torch_gpu();
/// After load_torch_gpu(): the device, if torch sees it. POLYKV_ERR_UNSUPPORTED.
Result<TorchDevice> torch_gpu(int index);

}  // namespace polykv
