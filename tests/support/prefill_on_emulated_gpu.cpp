// What polykv-prefill is linked with in a test of its GPU part, in place of its sandbox and of torch's CUDA. The device's
// memory is the emulated GPU's, over which torch computes on the processor. The emulation opens files where a driver would
// use descriptors that it has, so there is no filter here; sandbox_test looks at the one for GPUs.
#include "daemon/prefill/transformer/torch_gpu.h"
#include "daemon/prefill/worker/sandbox.h"
#include "tests/support/emulated_state.h"

namespace polykv {

Status load_torch_gpu() {
  return Status::ok();
}

Result<TorchDevice> torch_gpu(int index) {
  return TorchDevice{false, index};
}

/// A GPU that a filter would not let through has no driver from here on, if a test wants it so.
Status enter_sandbox(const SandboxLimits& limits) {
  if (!limits.uses_gpu)
    return {POLYKV_ERR_UNSUPPORTED, "this program is for tests on an emulated GPU alone"};
  const char* folder = std::getenv(test::kEmulationFolder);
  if (folder != nullptr && test::EmulatedFaults::read(folder).has("no_driver_in_sandbox"))
    ::setenv(test::kEmulatedFaults, "no_driver", 1);
  return Status::ok();
}

Status harden_process() {
  return Status::ok();
}

}  // namespace polykv
