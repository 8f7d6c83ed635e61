#include "kernels/cuda/device_launcher.cuh"
#include "kernels/cuda/encode_launcher.h"
#include "kernels/cuda/launch.h"

namespace polykv::cuda {

Status encode(const KvSource& source, const LayerSlot& slot, const Workspace& workspace,
              EncodeOutcome* outcome, void* stream) {
  DeviceLauncher launcher(stream);
  return encode_with(launcher, source, slot, workspace, outcome);
}

}  // namespace polykv::cuda
