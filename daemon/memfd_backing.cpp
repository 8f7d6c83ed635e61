#include "daemon/backing.h"

namespace polykv::daemon {

void MemfdBacking::measure(const SegmentPromise& /*promise*/,
                           Done<std::vector<MemoryHeadroom>> done) {
  done(memory_.measure());
}

void MemfdBacking::allocate(SharedPromise promise, Done<SegmentMemory> done) {
  pool_.submit<Result<SegmentMemory>>(
      [size_bytes = promise->size_bytes]() -> Result<SegmentMemory> {
        POLYKV_ASSIGN_OR_RETURN(UniqueFd memfd, allocate_segment(size_bytes));
        return SegmentMemory{std::make_shared<const UniqueFd>(std::move(memfd)), nullptr};
      },
      std::move(done));
}

void MemfdBacking::seal(SegmentMemory memory, SharedPromise promise, Done<SealedSegment> done) {
  pool_.submit<Result<SealedSegment>>(
      [memory = std::move(memory), promise = std::move(promise)] {
        return seal_and_verify(memory.writable->get(), *promise);
      },
      std::move(done));
}

}  // namespace polykv::daemon
