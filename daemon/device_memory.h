// An allocation of device memory that holds one segment's payload.
#pragma once

#include <memory>

#include "device/runtime.h"

namespace polykv::daemon {

/// Zeroed when it was made. Its last owner, on whatever thread, has it freed by the thread that makes
/// the device's calls; so it is not held by what other processes may still have open.
struct DeviceMemory {
  void* pointer = nullptr;
  uint64_t size_bytes = 0;
  device::IpcHandle handle{};
  device::Uuid device_uuid{};
};
using SharedDeviceMemory = std::shared_ptr<const DeviceMemory>;

}  // namespace polykv::daemon
