// Runtime: what polykv asks of a GPU's driver, and no more. The CUDA runtime is behind it in
// libpolykv_cuda.so, which is loaded when a document in device memory is made or read; tests load an
// emulation in its place (tests/support/emulated_device.h).
//
// A thread says use_device() before its other calls: which device is current is a property of the
// thread. A device pointer is valid in the process that allocated or opened it, and not in a child
// of a fork. Thread-safe but for that; open() and close() of one allocation must not race, which
// the caller sees to.
//
// Errors, whatever the implementation: POLYKV_ERR_UNSUPPORTED (no driver, no device, no interprocess
// handles), POLYKV_ERR_NO_MEMORY, POLYKV_ERR_DEVICE_LOST (nothing on the device works any more),
// POLYKV_ERR_WRONG_DEVICE, POLYKV_ERR_PERMISSION (memory of another user), POLYKV_ERR_INVALID_ARGUMENT.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "common/result.h"

namespace polykv::device {

/// Allocations are multiples of this, so that nothing else lies in what an exported handle maps.
inline constexpr uint64_t kGranularityBytes = uint64_t{2} << 20;
constexpr uint64_t round_up(uint64_t size_bytes) {
  return (size_bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
}

/// What another process of the same user opens an allocation with.
using IpcHandle = std::array<uint8_t, 64>;

using Uuid = std::array<uint8_t, 16>;
/// "GPU-01234567-89ab-cdef-0123-456789abcdef", as nvidia-smi writes it.
std::string uuid_text(const Uuid& uuid);

struct DeviceInfo {
  Uuid uuid{};
  std::string name;
  uint64_t total_bytes = 0;
};

struct MemoryInfo {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
};

/// 1000 x major + 10 x minor: 13000 is 13.0.
struct Versions {
  int driver = 0;  // the newest CUDA that the driver knows
  int runtime = 0;
};

class Runtime {
 public:
  virtual ~Runtime() = default;

  /// versions() and devices() fail, and may be asked again, while no driver is loaded.
  virtual Result<Versions> versions() = 0;
  /// In this process's order, which is not another's: match by UUID.
  virtual Result<std::vector<DeviceInfo>> devices() = 0;
  /// Makes a device of devices() current for this thread.
  virtual Status use_device(int index) = 0;

  // Of the current device:
  virtual Result<MemoryInfo> memory() = 0;
  /// size_bytes: a multiple of kGranularityBytes. The contents are whatever was there.
  virtual Result<void*> allocate(uint64_t size_bytes) = 0;
  /// Nobody has it open any more: otherwise the driver promises nothing.
  virtual Status free(void* pointer) = 0;
  /// Done when it returns, as are the copies.
  virtual Status zero(void* pointer, uint64_t size_bytes) = 0;
  virtual Status copy_to_device(void* target, const void* source, uint64_t size_bytes) = 0;
  virtual Status copy_to_host(void* target, const void* source, uint64_t size_bytes) = 0;

  /// Of the start of an allocation.
  virtual Result<IpcHandle> export_handle(void* pointer) = 0;
  /// Not in the process that exported it. Writable, whatever the handle was given for.
  virtual Result<void*> open(const IpcHandle& handle) = 0;
  /// As often as it was opened, and once nothing on any stream uses it.
  virtual Status close(void* pointer) = 0;

  /// `stream`: a cudaStream_t; null is the default stream.
  virtual Result<void*> create_stream() = 0;
  virtual Status destroy_stream(void* stream) = 0;
  /// Waits for all work that was given to the stream.
  virtual Status synchronize_stream(void* stream) = 0;
  /// A mark behind the stream's present work, to be waited for and then destroyed.
  virtual Result<void*> record_event(void* stream) = 0;
  virtual Status synchronize_event(void* event) = 0;
  virtual Status destroy_event(void* event) = 0;
  /// Waits for all streams of the current device.
  virtual Status synchronize_device() = 0;

  /// Whether kernels of the current device may read memory of another one.
  virtual Result<bool> can_access_peer(int peer) = 0;
  /// Allows it; fine when it was allowed already.
  virtual Status enable_peer_access(int peer) = 0;
};

/// Of Runtime's layout and meaning: a library of another version is refused.
inline constexpr uint32_t kRuntimeVersion = 1;

/// The one function that such a library exports: the process's runtime, or null when it knows
/// another version.
extern "C" {
using RuntimeFactory = Runtime* (*)(uint32_t version);
}
inline constexpr const char* kRuntimeFactoryName = "polykv_device_runtime";

}  // namespace polykv::device
