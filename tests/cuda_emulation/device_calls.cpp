#include "tests/cuda_emulation/device_calls.h"

#include "kernels/cuda/decode_launcher.h"

namespace polykv::test {

Status emulated_decode(const LayerView& layer, const DecodeTarget& target,
                       const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::decode_with(launcher, layer, target);
}

}  // namespace polykv::test
