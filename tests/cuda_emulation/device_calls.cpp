#include "tests/cuda_emulation/device_calls.h"

#include <cstdlib>
#include <memory>

#include "kernels/cuda/attend_launcher.h"
#include "kernels/cuda/decode_launcher.h"

namespace polykv::test {

Status emulated_decode(const LayerView& layer, const DecodeTarget& target,
                       const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::decode_with(launcher, layer, target);
}

Status emulated_attend(const cuda::AttendCall& call, uint32_t multiprocessor_count,
                       const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  POLYKV_RETURN_IF_ERROR(cuda::check_attend(call));
  const uint64_t size_bytes = cuda::plan_attend(call, multiprocessor_count).workspace_bytes;
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, size_bytes) != 0) return {POLYKV_ERR_NO_MEMORY, "workspace"};
  const std::unique_ptr<void, void (*)(void*)> owner(memory, std::free);
  std::memset(memory, 0xff, size_bytes);
  return cuda::attend_with(launcher, call, {memory, size_bytes}, multiprocessor_count);
}

}  // namespace polykv::test
