// Kernels: the functions of kernels/cuda/launch.h as libpolykv_cuda.so has them, beside its
// device::Runtime. libpolykv finds them there, so that neither links CUDA; tests load an emulation.
//
// The device is current for the calling thread and pointers are its own, as launch.h says, which has the errors too.
#pragma once

#include <cstdint>

#include "common/result.h"
#include "kernels/cuda/attend_call.h"
#include "kernels/cuda/checksum_call.h"
#include "kernels/cuda/encode_call.h"

namespace polykv::cuda {

/// Thread-safe; lives as long as the process.
class Kernels {
 public:
  virtual ~Kernels() = default;
  virtual Status encode(const KvSource& source, const LayerSlot& slot, const Workspace& workspace,
                        EncodeOutcome* outcome, void* stream) = 0;
  virtual Status decode(const LayerView& layer, const DecodeTarget& target, void* stream) = 0;
  /// The call was checked (check_attend).
  virtual Result<uint64_t> attend_workspace_bytes(const AttendCall& call) = 0;
  virtual Status attend(const AttendCall& call, const Workspace& workspace, void* stream) = 0;
  virtual Status checksum(std::span<const ChecksumRange> ranges, uint64_t* sums, void* stream) = 0;
};

/// Of Kernels' layout and meaning, and of the structs in it.
inline constexpr uint32_t kKernelsVersion = 2;

/// Null when the library knows another version.
extern "C" {
using KernelsFactory = Kernels* (*)(uint32_t version);
}
inline constexpr const char* kKernelsFactoryName = "polykv_device_kernels";

}  // namespace polykv::cuda
