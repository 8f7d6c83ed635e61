#include "kernels/cuda/attend_launcher.h"
#include "kernels/cuda/device_launcher.cuh"
#include "kernels/cuda/launch.h"

namespace polykv::cuda {

Status attend(const AttendCall& call, const Workspace& workspace, uint32_t multiprocessor_count,
              void* stream) {
  DeviceLauncher launcher(stream);
  return attend_with(launcher, call, workspace, multiprocessor_count);
}

}  // namespace polykv::cuda
