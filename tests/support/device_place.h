// A DevicePlace whose device is emulated: its memory is the emulated GPU's, which is host memory, and torch's tensors are
// on the processor, over that very memory. One for a test program.
#pragma once

#include <stdexcept>

#include "daemon/prefill/transformer/device_memory.h"
#include "device/library.h"
#include "tests/support/emulated_device.h"

namespace polykv::test {

class EmulatedPlace {
 public:
  static const EmulatedDevice& device() { return instance().device_; }
  static DevicePlace place() {
    instance().device_.use_here();  // before the library looks for it
    const auto runtime = device::load_runtime(POLYKV_EMULATED_LIBRARY);
    if (!runtime.is_ok()) throw std::runtime_error(runtime.status().message());
    return {*runtime, 0, TorchDevice{false, 0}};
  }
  static uint64_t free_bytes() {
    const DevicePlace here = place();
    if (!here.runtime->use_device(here.index).is_ok()) throw std::runtime_error("no device");
    return here.runtime->memory()->free_bytes;
  }

 private:
  static EmulatedPlace& instance() {
    static EmulatedPlace place;
    return place;
  }
  EmulatedDevice device_{uint64_t{4} << 30};
};

}  // namespace polykv::test
