// XXH3-64 checksums of bytes in device memory, which are those of a segment's layer records.
#pragma once

#include <cstdint>
#include <span>

#include "common/result.h"

namespace polykv::cuda {

struct ChecksumRange {
  const uint8_t* data = nullptr;  // the device's; 8-byte aligned
  uint64_t size_bytes = 0;
};

/// XXH3 has other rules for shorter inputs, which are the host's affair.
inline constexpr uint64_t kLeastChecksumBytes = 241;

/// What checksum() refuses: POLYKV_ERR_INVALID_ARGUMENT.
Status check_checksum(std::span<const ChecksumRange> ranges, const uint64_t* sums);

/// XXH3's default secret as the kernel reads it, in words, and what its sums begin with.
struct ChecksumSecret {
  uint64_t first[8];
  uint64_t words[24];  // from byte 0 on
  uint64_t last[8];    // for the last 64 bytes
  uint64_t merge[8];   // for joining the eight sums
};
const ChecksumSecret& checksum_secret();

}  // namespace polykv::cuda
