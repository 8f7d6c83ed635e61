// Runs kernels' bodies (kernels/cuda/thread.h) without a GPU: a fiber for each thread of a block,
// one block after the other, one fiber at a time. Which thread runs next is the schedule's choice, so
// that a body which is right only in some orders is found. What a device would do silently is a
// failure here: a barrier that some threads of the block or lanes of the warp do not reach, or that
// is another one for some of them. Shared memory is full of NaN (all bits one) when a block begins
// and has exactly the kernel's size, so that the address sanitizer sees what lies beside it.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <typeinfo>

#include "common/result.h"
#include "kernels/cuda/thread.h"

namespace polykv::test {

enum class Order { ascending, descending, random };

struct Schedule {
  Order order = Order::ascending;
  uint64_t seed = 0;  // of Order::random
  // The number of a barrier that does nothing, and the kernel that it is in (null: any); 0: none.
  uint32_t removed_sync = 0;
  const std::type_info* removed_from = nullptr;
};

/// What a fiber sees of the block that it is in.
class EmulatedThread {
 public:
  explicit EmulatedThread(uint32_t thread_index) : thread_index_(thread_index) {}

  uint32_t block_index() const;
  uint32_t thread_index() const { return thread_index_; }
  template <typename Shared>
  Shared& shared() const {
    return *static_cast<Shared*>(shared_memory(sizeof(Shared)));
  }
  void sync_threads(uint32_t number) const;
  void sync_warp(uint32_t number) const;
  template <typename T>
  T shuffle_xor(T value, uint32_t lane_mask) const {
    static_assert(sizeof(T) == sizeof(uint32_t));
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    word = exchange(word, thread_index_ % cuda::kWarpThreads ^ lane_mask);
    std::memcpy(&value, &word, sizeof word);
    return value;
  }
  void multiply_fragments(int32_t (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                          uint32_t b1) const;

 private:
  /// Every lane gives a word and takes that of another lane.
  uint32_t exchange(uint32_t word, uint32_t from_lane) const;
  void* shared_memory(size_t size_bytes) const;

  uint32_t thread_index_;
};

struct EmulatedGrid {
  uint32_t block_count;
  uint32_t block_threads;  // whole warps, at most 1024
  size_t shared_bytes;
  std::function<void(EmulatedThread&)> body;
};

/// Empty when every thread of every block ended well; otherwise what went wrong first, and the rest
/// did not run.
std::string run_grid(const EmulatedGrid& grid, const Schedule& schedule);

/// A launcher, as kernels/cuda/decode_launcher.h has it. Remembers the first failure.
class EmulatedLauncher {
 public:
  explicit EmulatedLauncher(const Schedule& schedule) : schedule_(schedule) {}

  template <typename Kernel>
  void launch(uint64_t block_count, const typename Kernel::Arguments& arguments) {
    if (!failure_.empty()) return;
    Schedule schedule = schedule_;
    if (schedule.removed_from != nullptr && *schedule.removed_from != typeid(Kernel))
      schedule.removed_sync = 0;
    failure_ = run_grid(
        {static_cast<uint32_t>(block_count), Kernel::kThreads, sizeof(typename Kernel::Shared),
         [&](EmulatedThread& thread) { Kernel::run(thread, arguments); }},
        schedule);
  }
  Status status() const {
    if (failure_.empty()) return Status::ok();
    return {POLYKV_ERR_INTERNAL, failure_};
  }

 private:
  Schedule schedule_;
  std::string failure_;
};

}  // namespace polykv::test
