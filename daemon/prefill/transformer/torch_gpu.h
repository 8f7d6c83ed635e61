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

/// Loads libtorch_cuda, for good, and asks it for the device. POLYKV_ERR_UNSUPPORTED says why there is none. Tests link
/// another one, whose device is host memory.
Result<TorchDevice> open_torch_gpu(int index);

}  // namespace polykv
