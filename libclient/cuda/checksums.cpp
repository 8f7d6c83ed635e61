#include "libclient/cuda/checksums.h"

#include <xxhash.h>

#include <algorithm>
#include <memory>

#include "libclient/cuda/kernel_calls.h"

namespace polykv::lib {

namespace {

constexpr uint64_t kPieceBytes = uint64_t{4} << 20;

struct FreeState {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

Result<uint64_t> sum_on_host(device::Runtime& runtime, const cuda::ChecksumRange& range) {
  const std::unique_ptr<XXH3_state_t, FreeState> state(XXH3_createState());
  if (state == nullptr) return {POLYKV_ERR_NO_MEMORY, "checksum: out of memory"};
  XXH3_64bits_reset(state.get());
  std::vector<uint8_t> piece(std::min(kPieceBytes, range.size_bytes));
  for (uint64_t done = 0; done < range.size_bytes;) {
    const uint64_t count = std::min<uint64_t>(piece.size(), range.size_bytes - done);
    POLYKV_RETURN_IF_ERROR(runtime.copy_to_host(piece.data(), range.data + done, count));
    XXH3_64bits_update(state.get(), piece.data(), count);
    done += count;
  }
  return XXH3_64bits_digest(state.get());
}

Status sum_on_device(device::Runtime& runtime, cuda::Kernels& kernels,
                     std::span<const cuda::ChecksumRange> ranges, uint64_t* sums) {
  const uint64_t size_bytes = ranges.size() * sizeof *sums;
  POLYKV_ASSIGN_OR_RETURN(void* const memory, runtime.allocate(device::round_up(size_bytes)));
  Status status = kernels.checksum(ranges, static_cast<uint64_t*>(memory), nullptr);
  // Waits for the default stream, and so for the kernels.
  if (status.is_ok()) status = runtime.copy_to_host(sums, memory, size_bytes);
  const Status freed = runtime.free(memory);
  return status.is_ok() ? freed : status;
}

}  // namespace

Result<std::vector<uint64_t>> device_checksums(device::Runtime& runtime,
                                               std::span<const cuda::ChecksumRange> ranges) {
  const Result<cuda::Kernels*> kernels = client_kernels();
  if (!kernels.is_ok() && kernels.status().code() != POLYKV_ERR_UNSUPPORTED)
    return kernels.status();
  std::vector<uint64_t> sums(ranges.size());
  std::vector<cuda::ChecksumRange> long_ranges;
  std::vector<size_t> long_indices;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (kernels.is_ok() && ranges[i].size_bytes >= cuda::kLeastChecksumBytes) {
      long_ranges.push_back(ranges[i]);
      long_indices.push_back(i);
    } else {
      POLYKV_ASSIGN_OR_RETURN(sums[i], sum_on_host(runtime, ranges[i]));
    }
  }
  if (long_ranges.empty()) return sums;
  std::vector<uint64_t> found(long_ranges.size());
  POLYKV_RETURN_IF_ERROR(sum_on_device(runtime, **kernels, long_ranges, found.data()));
  for (size_t i = 0; i < found.size(); ++i) sums[long_indices[i]] = found[i];
  return sums;
}

}  // namespace polykv::lib
