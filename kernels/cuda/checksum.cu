#include "kernels/cuda/checksum_launcher.h"
#include "kernels/cuda/device_launcher.cuh"
#include "kernels/cuda/launch.h"

namespace polykv::cuda {

Status checksum(std::span<const ChecksumRange> ranges, uint64_t* sums, void* stream) {
  DeviceLauncher launcher(stream);
  return checksum_with(launcher, ranges, sums);
}

}  // namespace polykv::cuda
