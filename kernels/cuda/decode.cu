#include "kernels/cuda/decode_launcher.h"
#include "kernels/cuda/device_launcher.cuh"
#include "kernels/cuda/launch.h"

namespace polykv::cuda {

Status decode(const LayerView& layer, const DecodeTarget& target, void* stream) {
  DeviceLauncher launcher(stream);
  return decode_with(launcher, layer, target);
}

}  // namespace polykv::cuda
