#include "kernels/cuda/checksum_call.h"

// The secret is not in the library's interface.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

namespace polykv::cuda {

Status check_checksum(std::span<const ChecksumRange> ranges, const uint64_t* sums) {
  if (sums == nullptr)
    return {POLYKV_ERR_INVALID_ARGUMENT, "checksum on the device: no place for the sums"};
  for (const ChecksumRange& range : ranges) {
    if (range.size_bytes >= kLeastChecksumBytes && range.data != nullptr &&
        reinterpret_cast<uintptr_t>(range.data) % 8 == 0)
      continue;
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("checksum on the device: %llu bytes at %p; at least %llu, aligned to 8, are "
                   "summed there",
                   static_cast<unsigned long long>(range.size_bytes),
                   static_cast<const void*>(range.data),
                   static_cast<unsigned long long>(kLeastChecksumBytes))};
  }
  return Status::ok();
}

const ChecksumSecret& checksum_secret() {
  static const ChecksumSecret secret = [] {
    ChecksumSecret s = {{XXH_PRIME32_3, XXH_PRIME64_1, XXH_PRIME64_2, XXH_PRIME64_3, XXH_PRIME64_4,
                         XXH_PRIME32_2, XXH_PRIME64_5, XXH_PRIME32_1},
                        {},
                        {},
                        {}};
    static_assert(sizeof s.words == XXH_SECRET_DEFAULT_SIZE);
    std::memcpy(s.words, XXH3_kSecret, sizeof s.words);
    std::memcpy(s.last, XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE - 64 - 7, sizeof s.last);
    std::memcpy(s.merge, XXH3_kSecret + 11, sizeof s.merge);
    return s;
  }();
  return secret;
}

}  // namespace polykv::cuda
