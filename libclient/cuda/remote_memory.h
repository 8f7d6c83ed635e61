// An allocation of the daemon as the wire names it.
#pragma once

#include <compare>
#include <cstdint>

#include "common/wire.h"
#include "device/runtime.h"

namespace polykv::lib {

struct RemoteMemory {
  device::IpcHandle handle{};
  device::Uuid device_uuid{};
  uint64_t size_bytes = 0;
  uint64_t epoch = 0;  // of the daemon's boot
  // NOLINTNEXTLINE(modernize-use-nullptr): it takes the generated comparison with 0 for one
  auto operator<=>(const RemoteMemory&) const = default;
};

inline RemoteMemory from_wire(const wire::DeviceMemory& memory) {
  RemoteMemory result;
  for (uint32_t i = 0; i < result.handle.size(); ++i) result.handle[i] = (*memory.handle())[i];
  for (uint32_t i = 0; i < result.device_uuid.size(); ++i)
    result.device_uuid[i] = (*memory.device_uuid())[i];
  result.size_bytes = memory.size_bytes();
  result.epoch = memory.epoch();
  return result;
}

}  // namespace polykv::lib
