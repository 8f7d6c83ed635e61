#include "tests/cuda_emulation/emulation.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <memory>
#include <random>
#include <vector>

#include "common/result.h"

#if defined(__SANITIZE_ADDRESS__)
#define POLYKV_FIBERS_ARE_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define POLYKV_FIBERS_ARE_SANITIZED 1
#endif
#endif
#ifdef POLYKV_FIBERS_ARE_SANITIZED
#include <sanitizer/common_interface_defs.h>
#endif

namespace polykv::test {

namespace {

constexpr uint32_t kMaxThreads = 1024;
// Small, because the address sanitizer goes over the whole stack at each switch; what grows beyond it is stopped by a page
// that nobody may touch.
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kGuardBytes = 4096;

/// The address sanitizer must know which stack it is on.
struct StackSwitch {
#ifdef POLYKV_FIBERS_ARE_SANITIZED
  static void begin(void** left, const void* bottom, size_t size_bytes) {
    __sanitizer_start_switch_fiber(left, bottom, size_bytes);
  }
  static void end(void* entered, const void** old_bottom, size_t* old_size_bytes) {
    __sanitizer_finish_switch_fiber(entered, old_bottom, old_size_bytes);
  }
#else
  static void begin(void**, const void*, size_t) {}
  static void end(void*, const void**, size_t*) {}
#endif
};

/// A stack and where its code was left. The body is called anew at each start; a fiber that was left
/// in the middle is given up with its stack. Switches are by longjmp, because swapcontext makes a
/// system call.
class Fiber {
 public:
  explicit Fiber(std::function<void()> body) : body_(std::move(body)) {
    mapping_ =
        mmap(nullptr, kGuardBytes + kStackBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert(mapping_ != MAP_FAILED);
    stack_ = static_cast<uint8_t*>(mapping_) + kGuardBytes;
    const int status = mprotect(stack_, kStackBytes, PROT_READ | PROT_WRITE);
    assert(status == 0);
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack_;
    start_.uc_stack.ss_size = kStackBytes;
    start_.uc_link = nullptr;
    const auto address = reinterpret_cast<uintptr_t>(this);
    makecontext(&start_, reinterpret_cast<void (*)()>(&Fiber::enter), 2,
                static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32));
  }
  ~Fiber() { munmap(mapping_, kGuardBytes + kStackBytes); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Until it pauses or its body ends.
  void resume() {
    void* left = nullptr;
    StackSwitch::begin(&left, stack_, kStackBytes);
    if (_setjmp(caller_) == 0) {
      if (is_started_) _longjmp(self_, 1);
      is_started_ = true;
      setcontext(&start_);
    }
    StackSwitch::end(left, nullptr, nullptr);
  }
  /// From inside.
  void pause() {
    void* left = nullptr;
    StackSwitch::begin(&left, caller_stack_, caller_stack_bytes_);
    if (_setjmp(self_) == 0) _longjmp(caller_, 1);
    StackSwitch::end(left, &caller_stack_, &caller_stack_bytes_);
  }

 private:
  static void enter(uint32_t low, uint32_t high) {
    auto* fiber = reinterpret_cast<Fiber*>(uintptr_t{high} << 32 | low);
    StackSwitch::end(nullptr, &fiber->caller_stack_, &fiber->caller_stack_bytes_);
    for (;;) {
      fiber->body_();
      fiber->pause();
    }
  }

  std::function<void()> body_;
  void* mapping_ = nullptr;
  void* stack_ = nullptr;
  ucontext_t start_{};
  jmp_buf caller_{};
  jmp_buf self_{};
  bool is_started_ = false;
  const void* caller_stack_ = nullptr;
  size_t caller_stack_bytes_ = 0;
};

/// Threads that wait for each other: the lanes of a warp, or a block.
struct Meeting {
  uint32_t size = 0;
  uint32_t arrived = 0;
  uint32_t left = 0;    // have ended
  uint32_t number = 0;  // of the barrier that those who arrived are at
  uint32_t first = 0;   // the thread that arrived first
};

constexpr uint32_t kExchange = 0xffffffffU;  // a number of no barrier

/// What a lane gives to the others of its warp: a word, or its parts of A and B.
using Given = std::array<uint32_t, 6>;

/// One block at a time; the fibers stay.
class Block {
 public:
  std::string run(const EmulatedGrid& grid, uint32_t index, const Schedule& schedule);
  uint32_t index() const { return index_; }
  void arrive(uint32_t thread, bool is_warp, uint32_t number);
  /// [lane], until the warp's next exchange but one.
  const Given* exchange(uint32_t thread, const Given& given);
  bool is_removed(uint32_t number) const { return number == schedule_->removed_sync; }
  void* shared_memory(size_t size_bytes) {
    assert(size_bytes == grid_->shared_bytes);
    return shared_.get();
  }

 private:
  void begin(const EmulatedGrid& grid, uint32_t index, const Schedule& schedule);
  uint32_t next_thread();
  void run_thread(uint32_t thread);
  void end_thread(uint32_t thread);
  void fail(std::string cause) {
    if (failure_.empty()) failure_ = std::move(cause);
  }
  void set_ready(uint32_t thread) { ready_[thread / 64] |= uint64_t{1} << (thread % 64); }
  void set_waiting(uint32_t thread) { ready_[thread / 64] &= ~(uint64_t{1} << (thread % 64)); }
  /// The first that is ready among `start` and those behind it; kMaxThreads: none is.
  uint32_t ready_from(uint32_t start) const {
    uint64_t word = ready_[start / 64] >> (start % 64) << (start % 64);
    for (uint32_t at = start / 64;; word = ready_[at]) {
      if (word != 0) return at * 64 + static_cast<uint32_t>(std::countr_zero(word));
      if (++at == ready_.size()) return kMaxThreads;
    }
  }

  const EmulatedGrid* grid_ = nullptr;
  const Schedule* schedule_ = nullptr;
  uint32_t index_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::unique_ptr<uint8_t[]> shared_;
  std::array<uint64_t, kMaxThreads / 64> ready_{};
  std::mt19937_64 engine_;
  uint32_t running_count_ = 0;
  Meeting block_meeting_;
  std::vector<Meeting> warp_meetings_;
  // What lanes exchange, of even and of odd exchanges: nobody can be two ahead of another.
  std::vector<Given> given_[2];
  std::vector<uint8_t> exchanges_;  // [thread], how many, modulo 2
  std::string failure_;
};

Block& block() {
  static Block the_only_one;
  return the_only_one;
}

void Block::begin(const EmulatedGrid& grid, uint32_t index, const Schedule& schedule) {
  assert(grid.block_threads % cuda::kWarpThreads == 0 && grid.block_threads <= kMaxThreads);
  grid_ = &grid;
  schedule_ = &schedule;
  index_ = index;
  engine_.seed(schedule.seed * 0x9e3779b97f4a7c15U + index);
  shared_.reset(new uint8_t[grid.shared_bytes]);
  std::memset(shared_.get(), 0xff, grid.shared_bytes);
  running_count_ = grid.block_threads;
  ready_.fill(0);
  for (uint32_t thread = 0; thread < grid.block_threads; ++thread) set_ready(thread);
  block_meeting_ = {grid.block_threads};
  warp_meetings_.assign(grid.block_threads / cuda::kWarpThreads, {cuda::kWarpThreads});
  for (std::vector<Given>& given : given_) given.assign(grid.block_threads, {});
  exchanges_.assign(grid.block_threads, 0);
  while (fibers_.size() < grid.block_threads) {
    const auto thread = static_cast<uint32_t>(fibers_.size());
    fibers_.push_back(std::make_unique<Fiber>([this, thread] { run_thread(thread); }));
  }
}

void Block::run_thread(uint32_t thread) {
  EmulatedThread view(thread);
  grid_->body(view);
  end_thread(thread);
}

void Block::end_thread(uint32_t thread) {
  set_waiting(thread);
  --running_count_;
  Meeting& warp = warp_meetings_[thread / cuda::kWarpThreads];
  for (Meeting* meeting : {&block_meeting_, &warp}) {
    ++meeting->left;
    if (meeting->arrived == 0) continue;
    fail(format("thread %u ended while thread %u waited for it at barrier %d of its %s", thread,
                meeting->first, static_cast<int>(meeting->number),
                meeting == &warp ? "warp" : "block"));
  }
}

void Block::arrive(uint32_t thread, bool is_warp, uint32_t number) {
  const uint32_t first = is_warp ? thread / cuda::kWarpThreads * cuda::kWarpThreads : 0;
  Meeting& meeting = is_warp ? warp_meetings_[thread / cuda::kWarpThreads] : block_meeting_;
  const char* const whose = is_warp ? "warp" : "block";
  if (meeting.left != 0) {
    fail(format("thread %u waits at barrier %d for its %s, some of which ended", thread,
                static_cast<int>(number), whose));
  }
  if (meeting.arrived == 0) {
    meeting.number = number;
    meeting.first = thread;
  } else if (meeting.number != number) {
    fail(format("threads %u and %u of a %s are at barriers %d and %d", meeting.first, thread, whose,
                static_cast<int>(meeting.number), static_cast<int>(number)));
  }
  set_waiting(thread);
  if (++meeting.arrived == meeting.size) {
    meeting.arrived = 0;
    for (uint32_t i = 0; i < meeting.size; ++i) set_ready(first + i);
  }
  // Others may run first even where this one was the last to arrive.
  fibers_[thread]->pause();
}

const Given* Block::exchange(uint32_t thread, const Given& given) {
  std::vector<Given>& all = given_[exchanges_[thread]];
  exchanges_[thread] ^= 1U;
  all[thread] = given;
  arrive(thread, true, kExchange);
  return &all[thread / cuda::kWarpThreads * cuda::kWarpThreads];
}

uint32_t Block::next_thread() {
  const uint32_t count = grid_->block_threads;
  if (schedule_->order == Order::random) {
    const uint32_t behind = ready_from(static_cast<uint32_t>(engine_() % count));
    return std::min(behind < kMaxThreads ? behind : ready_from(0), count);
  }
  if (schedule_->order == Order::ascending) return std::min(ready_from(0), count);
  for (size_t at = ready_.size(); at-- > 0;) {
    if (ready_[at] != 0)
      return static_cast<uint32_t>(at * 64 + 63) -
             static_cast<uint32_t>(std::countl_zero(ready_[at]));
  }
  return count;
}

std::string Block::run(const EmulatedGrid& grid, uint32_t index, const Schedule& schedule) {
  begin(grid, index, schedule);
  failure_.clear();
  while (running_count_ > 0 && failure_.empty()) {
    const uint32_t thread = next_thread();
    if (thread == grid.block_threads) {
      const Meeting* stuck = &block_meeting_;
      for (const Meeting& warp : warp_meetings_) {
        if (warp.arrived != 0) stuck = &warp;
      }
      fail(format("thread %u waits at barrier %d, where not all come", stuck->first,
                  static_cast<int>(stuck->number)));
      break;
    }
    fibers_[thread]->resume();
  }
  if (!failure_.empty()) {
    fibers_.clear();  // some are in the middle of a body
    return format("block %u: ", index) + failure_;
  }
  return {};
}

}  // namespace

uint32_t EmulatedThread::block_index() const {
  return block().index();
}

void* EmulatedThread::shared_memory(size_t size_bytes) const {
  return block().shared_memory(size_bytes);
}

void EmulatedThread::sync_threads(uint32_t number) const {
  if (!block().is_removed(number)) block().arrive(thread_index_, false, number);
}

void EmulatedThread::sync_warp(uint32_t number) const {
  if (!block().is_removed(number)) block().arrive(thread_index_, true, number);
}

uint32_t EmulatedThread::exchange(uint32_t word, uint32_t from_lane) const {
  return block().exchange(thread_index_, {word})[from_lane][0];
}

void EmulatedThread::multiply_fragments(int32_t (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) const {
  const Given* lanes = block().exchange(thread_index_, {a[0], a[1], a[2], a[3], b0, b1});
  const auto byte = [](uint32_t word, uint32_t index) {
    return static_cast<int32_t>(static_cast<int8_t>(word >> (8 * index)));
  };
  const uint32_t lane = thread_index_ % cuda::kWarpThreads;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = lane / 4 + i / 2 * 8;
    const uint32_t column = lane % 4 * 2 + i % 2;
    for (uint32_t k = 0; k < 32; ++k) {
      const Given& of_a = lanes[row % 8 * 4 + k % 16 / 4];
      const Given& of_b = lanes[column * 4 + k % 16 / 4];
      sums[i] += byte(of_a[row / 8 + k / 16 * 2], k % 4) * byte(of_b[4 + k / 16], k % 4);
    }
  }
}

std::string run_grid(const EmulatedGrid& grid, const Schedule& schedule) {
  std::vector<uint32_t> order(grid.block_count);
  for (uint32_t i = 0; i < grid.block_count; ++i) {
    order[i] = schedule.order == Order::descending ? grid.block_count - 1 - i : i;
  }
  if (schedule.order == Order::random) {
    std::mt19937_64 engine(schedule.seed);
    std::shuffle(order.begin(), order.end(), engine);
  }
  for (const uint32_t index : order) {
    if (std::string failure = block().run(grid, index, schedule); !failure.empty()) return failure;
  }
  return {};
}

}  // namespace polykv::test
