// What tests of documents in device memory share: the program's emulated GPU, with a clean slate for
// each test case, and short ways to call the C ABI. Uses Catch2's REQUIRE.
#pragma once

#include <catch2/catch.hpp>
#include <memory>
#include <string>

#include "device/library.h"
#include "polykv/cuda.h"
#include "tests/support/daemon_process.h"
#include "tests/support/emulated_device.h"
#include "tests/support/require_ok.h"
#include "tests/support/synthetic_document.h"

namespace polykv::test {

/// A process finds one emulated GPU and keeps it, as with a real one: test cases of a program share
/// theirs. At its end a test case has done nothing that a GPU does not allow, or expects it.
class CudaBench {
 public:
  CudaBench() {
    the_device().set_faults("");
    the_device().change([](EmulatedState& state) {
      state.foreign_bytes = 0;
      state.open_total = 0;
      state.refused_export_total = 0;
    });
    forget_violations();
  }
  ~CudaBench() { CHECK(the_device().violations() == ""); }
  CudaBench(const CudaBench&) = delete;
  CudaBench& operator=(const CudaBench&) = delete;

  const EmulatedDevice& device() const { return the_device(); }
  static void forget_violations() { std::ofstream(the_device().path() + "/violations"); }

 private:
  static const EmulatedDevice& the_device() {
    static const EmulatedDevice device(uint64_t{1} << 30, 2);
    static const bool is_in_use = (device.use_here(), true);
    static_cast<void>(is_in_use);
    return device;
  }
};

inline device::Runtime& runtime_here() {
  const auto runtime = device::load_runtime(POLYKV_EMULATED_LIBRARY);
  REQUIRE_OK(runtime);
  return **runtime;
}

/// A kernel of a test that uses device memory until its stream is waited for.
inline void keep_busy(void* stream, const void* pointer) {
  const auto keep = device::find_function(POLYKV_EMULATED_LIBRARY, "polykv_emulated_keep_busy");
  REQUIRE_OK(keep);
  reinterpret_cast<void (*)(void*, const void*)> (*keep)(stream, pointer);
}

/// Device memory of this process.
class DeviceBuffer {
 public:
  DeviceBuffer(const CudaBench&, uint64_t size_bytes) {
    REQUIRE_OK(runtime_here().use_device(0));
    const auto pointer = runtime_here().allocate(device::round_up(size_bytes));
    REQUIRE_OK(pointer);
    pointer_ = *pointer;
  }
  ~DeviceBuffer() { static_cast<void>(runtime_here().free(pointer_).is_ok()); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  void* get() const { return pointer_; }

 private:
  void* pointer_ = nullptr;
};

inline polykv_cuda_layer_view cuda_view(const client::Lease& lease, uint32_t segment,
                                        uint32_t layer, int device = -1) {
  polykv_cuda_layer_view view;
  polykv_cuda_layer_view_init(&view);
  const polykv_status status =
      polykv_cuda_lease_layer_view(lease.get(), segment, layer, device, &view);
  INFO(polykv_last_error());
  REQUIRE(status == POLYKV_OK);
  return view;
}

inline client::Segment begin_on_gpu(client::Publisher& publisher, uint64_t token_count) {
  polykv_segment* segment = nullptr;
  const polykv_status status = polykv_cuda_segment_begin(publisher.get(), token_count, &segment);
  INFO(polykv_last_error());
  REQUIRE(status == POLYKV_OK);
  return client::Segment(segment);
}

}  // namespace polykv::test
