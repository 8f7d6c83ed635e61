// The DevicePlace of a test program. On the emulation its memory is the emulated GPU's, which is host memory, and torch's
// tensors are on the processor, over that very memory; else it is this machine's GPU, and without one, or with a libtorch
// that has no CUDA, the program exits with 77, or
// with 1 where POLYKV_TEST_NEEDS_GPU says that there is one (scripts/gpu-check).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "daemon/prefill/transformer/device_memory.h"
#include "device/library.h"
#ifdef POLYKV_ON_EMULATION
#include "tests/support/emulated_device.h"
#endif

namespace polykv::test {

#ifdef POLYKV_ON_EMULATION

class TestPlace {
 public:
  static const EmulatedDevice& device() {
    static const EmulatedDevice device(uint64_t{4} << 30);
    return device;
  }
  static DevicePlace place() {
    device().use_here();  // before the library looks for it
    const auto runtime = device::load_runtime(POLYKV_EMULATED_LIBRARY);
    if (!runtime.is_ok()) throw std::runtime_error(runtime.status().message());
    return {*runtime, 0, TorchDevice{false, 0}};
  }
  static uint64_t free_bytes() {
    const DevicePlace here = place();
    if (!here.runtime->use_device(here.index).is_ok()) throw std::runtime_error("no device");
    return here.runtime->memory()->free_bytes;
  }
  static std::string violations() { return device().violations(); }
};

#else

class TestPlace {
 public:
  static DevicePlace place() {
    static const DevicePlace place = find_or_skip();
    return place;
  }
  static std::string violations() { return ""; }

 private:
  static DevicePlace find_or_skip() {
    const char* elsewhere = std::getenv("POLYKV_TEST_CUDA_LIBRARY");
    const std::string library = elsewhere == nullptr ? POLYKV_CUDA_LIBRARY_PATH : elsewhere;
    Status why = load_torch_gpu();
    if (why.is_ok()) {
      const auto runtime = device::load_runtime(library);
      const auto devices = runtime.is_ok() ? (*runtime)->devices() : runtime.status();
      const auto torch = devices.is_ok() ? torch_gpu(0) : devices.status();
      if (torch.is_ok() && !devices->empty()) return {*runtime, 0, *torch};
      why = torch.is_ok() ? Status(POLYKV_ERR_UNSUPPORTED, "no GPU") : torch.status();
    }
    std::printf("unavailable: %s\n", why.message().c_str());
    std::fflush(stdout);
    std::_Exit(std::getenv("POLYKV_TEST_NEEDS_GPU") != nullptr ? 1 : 77);
  }
};

#endif

}  // namespace polykv::test
