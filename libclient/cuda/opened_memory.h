// Device memory of the daemon in this process: each allocation is open once, however many leases use
// it, and closed with the last of them.
#pragma once

#include <cstdint>
#include <string>

#include "common/result.h"
#include "device/runtime.h"
#include "libclient/cuda/remote_memory.h"

namespace polykv::lib {

/// A GPU as this process knows it.
struct Gpu {
  device::Runtime* runtime = nullptr;  // lives as long as the process
  int index = 0;                       // of runtime->devices()
  device::DeviceInfo info;
};

/// POLYKV_CUDA_LIBRARY (not of set-user-id programs), else libpolykv_cuda.so.0.
std::string client_library();
/// The runtime of that library.
/// `daemon_driver`: the CUDA version of the daemon's driver; 0: it does not matter. POLYKV_ERR_UNSUPPORTED: it cannot be
/// loaded; POLYKV_ERR_VERSION: the driver here is of another version.
Result<device::Runtime*> client_runtime(uint32_t daemon_driver);
/// POLYKV_ERR_WRONG_DEVICE tells which GPU was meant and which this process sees.
Result<Gpu> find_gpu(device::Runtime& runtime, const device::Uuid& uuid);

/// Move-only. Destroyed by any thread, once nothing that it gave to a stream reads the memory any
/// more: it waits for all streams of the device. In a child of a fork it does nothing.
class OpenedMemory {
 public:
  OpenedMemory() = default;
  /// POLYKV_ERR_STALE: the allocation is not there any more, or not for this process; others as of
  /// Runtime::open().
  static Result<OpenedMemory> open(const Gpu& gpu, const RemoteMemory& memory);
  OpenedMemory(OpenedMemory&& other) noexcept;
  OpenedMemory& operator=(OpenedMemory&& other) noexcept;
  ~OpenedMemory();

  void* pointer() const { return pointer_; }
  const Gpu& gpu() const { return gpu_; }
  Status close();

 private:
  Gpu gpu_;
  RemoteMemory memory_;
  void* pointer_ = nullptr;  // null: not open
  uint64_t generation_ = 0;
};

}  // namespace polykv::lib
