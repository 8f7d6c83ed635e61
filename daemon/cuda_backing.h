// Segments in the memory of one GPU, for the daemon's own user: the driver lets nobody else import
// an allocation, and whoever imports it can write to it. So neither other users nor the public
// domain are served.
//
// All calls of the device are made by one thread, in order: what was freed is free before the next
// allocation, and a call that hangs holds up nobody but those who want device memory.
#pragma once

#include <memory>

#include "daemon/backing.h"
#include "daemon/device_start.h"
#include "device/segment_image.h"

namespace polykv::daemon {

class CudaBacking final : public Backing {
 public:
  struct Settings {
    StartedDevice device;
    uint64_t device_reserve_bytes = 0;
    uint64_t host_reserve_bytes = 0;
  };
  /// on_lost runs once, on the loop's thread, when the device stopped working.
  CudaBacking(EventLoop& loop, ThreadPool& pool, const MemoryProbe& memory, Settings settings,
              std::function<void(const Status&)> on_lost);
  /// What is allocated goes with the process.
  ~CudaBacking() override;

  const BackingFacts& facts() const override { return facts_; }
  Status check_user(uid_t uid, bool is_public) const override;
  uint64_t charged_bytes(const SegmentPromise& promise) const override;
  uint64_t reserve_bytes() const override { return settings_.device_reserve_bytes; }
  void measure(const SegmentPromise& promise, Done<std::vector<MemoryHeadroom>> done) override;
  void allocate(SharedPromise promise, Done<SegmentMemory> done) override;
  void seal(SegmentMemory memory, SharedPromise promise, Done<SealedSegment> done) override;

 private:
  /// Lets what outlives the backing find its thread, or learn that there is none any more.
  struct Thread;

  template <typename T>
  void on_device(std::function<Result<T>()> work, Done<T> done);
  static uint64_t host_bytes(const SegmentPromise& promise) {
    return promise.into_device ? promise.data_offset : promise.size_bytes;
  }
  Status check_host_memory(const SegmentPromise& promise) const;
  void look_again();
  void lose(const Status& why);
  std::string memory_name() const;
  Result<SharedDeviceMemory> allocate_device(uint64_t size_bytes) const;
  /// Copies a verified segment, and makes the memfd of what is before its payload.
  Result<SealedSegment> move_in(SealedSegment sealed, const DeviceMemory& memory,
                                const SegmentPromise& promise) const;

  EventLoop& loop_;
  ThreadPool& pool_;
  const MemoryProbe& memory_;
  Settings settings_;
  BackingFacts facts_;
  std::function<void(const Status&)> on_lost_;
  uint64_t host_unallocated_bytes_ = 0;  // let in, but the machine does not count it yet
  bool is_lost_ = false;
  uint32_t failed_looks_ = 0;  // in a row
  std::shared_ptr<Thread> thread_;
};

}  // namespace polykv::daemon
