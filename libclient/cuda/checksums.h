// Checksums of what is in device memory now.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/runtime.h"
#include "kernels/cuda/checksum_call.h"

namespace polykv::lib {

/// XXH3-64 of each range, of the current GPU: computed there, or on the host from a copy where the CUDA
/// library has no kernels and for ranges too short for them. Takes 2 MiB of device memory meanwhile, or
/// 4 MiB of the host's.
Result<std::vector<uint64_t>> device_checksums(device::Runtime& runtime,
                                               std::span<const cuda::ChecksumRange> ranges);

}  // namespace polykv::lib
