#include "tests/cuda_emulation/device_calls.h"

#include <cstdlib>
#include <memory>
#include <new>

#include "kernels/cuda/attend_launcher.h"
#include "kernels/cuda/decode_launcher.h"
#include "kernels/cuda/encode_launcher.h"

namespace polykv::test {

Status emulated_decode(const LayerView& layer, const DecodeTarget& target,
                       const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::decode_with(launcher, layer, target);
}

namespace {

/// Device memory of exactly the planned size, full of NaN.
class EmulatedMemory {
 public:
  explicit EmulatedMemory(uint64_t size_bytes) : size_bytes_(size_bytes) {
    if (posix_memalign(&data_, 256, size_bytes) != 0) throw std::bad_alloc();
    std::memset(data_, 0xff, size_bytes);
  }
  ~EmulatedMemory() { std::free(data_); }
  EmulatedMemory(const EmulatedMemory&) = delete;
  EmulatedMemory& operator=(const EmulatedMemory&) = delete;
  cuda::Workspace workspace() const { return {data_, size_bytes_}; }

 private:
  void* data_ = nullptr;
  uint64_t size_bytes_;
};

}  // namespace

Status emulated_attend(const cuda::AttendCall& call, uint32_t multiprocessor_count,
                       const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  POLYKV_RETURN_IF_ERROR(cuda::check_attend(call));
  const EmulatedMemory memory(cuda::plan_attend(call, multiprocessor_count).workspace_bytes);
  return cuda::attend_with(launcher, call, memory.workspace(), multiprocessor_count);
}

Status emulated_encode(const KvSource& source, LayerSlot& slot, const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  POLYKV_RETURN_IF_ERROR(cuda::check_encode(source, slot));
  const EmulatedMemory memory(cuda::encode_workspace_bytes(slot));
  const auto outcome = std::make_unique<cuda::EncodeOutcome>();
  std::memset(static_cast<void*>(outcome.get()), 0xff, sizeof *outcome);
  POLYKV_RETURN_IF_ERROR(
      cuda::encode_with(launcher, source, slot, memory.workspace(), outcome.get()));
  slot.scales = outcome->scales;
  return cuda::encode_status(*outcome, slot.profile, slot.source_dtype);
}

}  // namespace polykv::test
