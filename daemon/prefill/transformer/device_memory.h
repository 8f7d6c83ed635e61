// Device memory of this process, through polykv's own runtime: what is kept between calls (weights, KV caches, workspaces),
// so that how much there is does not depend on what torch's allocator holds back.
#pragma once

#include <cstdint>
#include <utility>

#include "common/result.h"
#include "daemon/prefill/transformer/torch_gpu.h"
#include "device/runtime.h"

namespace polykv {

/// A GPU, as polykv's runtime and as torch know it: the same device, whose memory both use.
struct DevicePlace {
  device::Runtime* runtime = nullptr;  // lives as long as the process
  int index = 0;                       // of runtime->devices()
  TorchDevice torch;
};

/// What fails for want of device memory says how much is free, if that is known; other errors, and none, stay as they are.
Status with_free_memory(const DevicePlace& place, const Status& status);

/// Move-only. Freed by any thread, once no work on any stream uses it.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// `what` is for the message. POLYKV_ERR_NO_MEMORY tells how much was wanted and how much is free.
  static Result<DeviceMemory> allocate(const DevicePlace& place, uint64_t size_bytes,
                                       const char* what);
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(place_, other.place_);
    std::swap(pointer_, other.pointer_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  ~DeviceMemory();

  void* pointer() const { return pointer_; }
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  DevicePlace place_;
  void* pointer_ = nullptr;
  uint64_t size_bytes_ = 0;
};

}  // namespace polykv
