// Queues checksums. Launcher: as in kernels/cuda/decode_launcher.h.
#pragma once

#include <algorithm>

#include "kernels/cuda/checksum_kernel.h"

namespace polykv::cuda {

template <typename Launcher>
Status checksum_with(Launcher& launcher, std::span<const ChecksumRange> ranges, uint64_t* sums) {
  POLYKV_RETURN_IF_ERROR(check_checksum(ranges, sums));
  for (size_t done = 0; done < ranges.size(); done += ChecksumArguments::kMaxRanges) {
    ChecksumArguments arguments{{}, checksum_secret(), sums + done};
    const size_t count = std::min<size_t>(ranges.size() - done, ChecksumArguments::kMaxRanges);
    std::copy_n(ranges.begin() + static_cast<std::ptrdiff_t>(done), count, arguments.ranges);
    launcher.template launch<ChecksumKernel>(count, arguments);
  }
  return launcher.status();
}

}  // namespace polykv::cuda
