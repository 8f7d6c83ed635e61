// Where segments' bytes are: in memfds, or in device memory. One backing a daemon.
//
// memfd: a memfd of the whole segment; the producer fills it, on commit it is sealed, then verified.
// cuda: an allocation of device memory has the payload, a small sealed memfd what is before it. A
// producer without a GPU fills a memfd of the whole segment, which is sealed and verified as above and
// then copied: nobody else could write to what was verified. One that asks for it (into_device) gets
// the device memory itself; then what is verified is what the daemon reads back.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "daemon/device_memory.h"
#include "daemon/memory_probe.h"
#include "daemon/segment_backing.h"
#include "daemon/thread_pool.h"

namespace polykv::daemon {

/// A segment's memory in its producer's hands.
struct SegmentMemory {
  std::shared_ptr<const UniqueFd> writable;  // for the producer
  SharedDeviceMemory device;                 // null: the memfd is all there is
};

/// What can be told of a backing.
struct BackingFacts {
  std::string name;  // "memfd", "cuda"
  std::string note;  // why it is not what was configured
  // Of cuda:
  device::DeviceInfo device;
  device::Versions versions;
  uint64_t free_bytes = 0;     // when it was last looked at
  uint64_t reserve_bytes = 0;  // left free for others
  bool is_cuda() const { return name == "cuda"; }
};

/// For the loop's thread; each `done` runs there, perhaps before the call that it was given to returns.
class Backing {
 public:
  template <typename T>
  using Done = std::function<void(Result<T>)>;
  using SharedPromise = std::shared_ptr<const SegmentPromise>;

  virtual ~Backing() = default;
  virtual const BackingFacts& facts() const = 0;
  /// Whether a user may lease or produce here at all, and have what everybody may read made.
  virtual Status check_user(uid_t uid, bool is_public) const = 0;
  /// What a segment takes of the budget.
  virtual uint64_t charged_bytes(const SegmentPromise& promise) const = 0;
  /// To be left free of each headroom that measure() tells.
  virtual uint64_t reserve_bytes() const = 0;
  /// What limits the memory for one more segment. Fails if eviction could not help.
  virtual void measure(const SegmentPromise& promise, Done<std::vector<MemoryHeadroom>> done) = 0;
  virtual void allocate(SharedPromise promise, Done<SegmentMemory> done) = 0;
  /// After it the segment can be leased; see seal_and_verify().
  virtual void seal(SegmentMemory memory, SharedPromise promise, Done<SealedSegment> done) = 0;
};

class MemfdBacking final : public Backing {
 public:
  /// note: why it is not another one.
  MemfdBacking(ThreadPool& pool, const MemoryProbe& memory, uint64_t reserve_bytes,
               std::string note)
      : pool_(pool), memory_(memory), reserve_bytes_(reserve_bytes) {
    facts_.name = "memfd";
    facts_.note = std::move(note);
  }
  const BackingFacts& facts() const override { return facts_; }
  Status check_user(uid_t, bool) const override { return Status::ok(); }
  uint64_t charged_bytes(const SegmentPromise& promise) const override {
    return promise.size_bytes;
  }
  uint64_t reserve_bytes() const override { return reserve_bytes_; }
  void measure(const SegmentPromise& promise, Done<std::vector<MemoryHeadroom>> done) override;
  void allocate(SharedPromise promise, Done<SegmentMemory> done) override;
  void seal(SegmentMemory memory, SharedPromise promise, Done<SealedSegment> done) override;

 private:
  ThreadPool& pool_;
  const MemoryProbe& memory_;
  uint64_t reserve_bytes_;
  BackingFacts facts_;
};

}  // namespace polykv::daemon
