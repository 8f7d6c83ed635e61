#include "daemon/prefill/transformer/device_memory.h"

namespace polykv {

Status with_free_memory(const DevicePlace& place, const Status& status) {
  if (status.code() != POLYKV_ERR_NO_MEMORY) return status;
  const Result<device::MemoryInfo> info = place.runtime->memory();
  if (!info.is_ok()) return status;
  return {status.code(),
          status.message() + format("; %llu MiB of device memory are free",
                                    static_cast<unsigned long long>(info->free_bytes >> 20))};
}

Result<DeviceMemory> DeviceMemory::allocate(const DevicePlace& place, uint64_t size_bytes,
                                            const char* what) {
  POLYKV_RETURN_IF_ERROR(place.runtime->use_device(place.index));
  DeviceMemory memory;
  const uint64_t rounded = device::round_up(size_bytes);
  const Result<void*> pointer = place.runtime->allocate(rounded);
  if (!pointer.is_ok()) {
    return with_free_memory(place, pointer.status())
        .with_context(format("allocate %llu MiB of device memory for %s",
                             static_cast<unsigned long long>(rounded >> 20), what));
  }
  memory.place_ = place;
  memory.pointer_ = *pointer;
  memory.size_bytes_ = rounded;
  return memory;
}

DeviceMemory::~DeviceMemory() {
  if (pointer_ == nullptr) return;
  // A device that is lost has nothing to give back.
  if (place_.runtime->use_device(place_.index).is_ok())
    static_cast<void>(place_.runtime->free(pointer_).is_ok());
}

}  // namespace polykv
