// The one thread that owns all state: descriptors, timers (CLOCK_MONOTONIC), results of the thread
// pool.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "common/fd.h"
#include "common/result.h"

namespace polykv::daemon {

/// Everything is for the loop's thread, except post().
class EventLoop {
 public:
  using Callback = std::function<void(uint32_t events)>;
  using Task = std::function<void()>;
  using TimerId = uint64_t;  // 0: none

  static Result<std::unique_ptr<EventLoop>> create();
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  /// Calls back on events (EPOLL*) of fd, which stays the caller's and must be unwatched before it
  /// is closed. One watch a descriptor.
  Status watch(int fd, uint32_t events, Callback callback);
  void rewatch(int fd, uint32_t events);
  void unwatch(int fd);

  /// Runs once, not before delay_ms have passed.
  TimerId add_timer(int64_t delay_ms, Task task);
  /// A timer that ran, or 0, is allowed.
  void cancel_timer(TimerId id);

  /// Runs after the callback that is running now: ends things that this callback may still use.
  void defer(Task task);
  /// Runs soon on the loop's thread. Any thread; dropped once the loop is destroyed.
  void post(Task task);

  void run();   // until stop()
  void stop();  // run() returns after the current callback

  static int64_t now_ms();

 private:
  struct Watch {
    int fd = -1;
    Callback callback;
  };

  EventLoop() = default;
  void run_deferred();
  void run_posted();
  void run_timers();
  int wait_ms() const;

  UniqueFd epoll_;
  UniqueFd wakeup_;  // eventfd
  // Events name a watch by a number that is never used again: an event of a watch that ended in
  // the same batch finds nothing.
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, std::shared_ptr<Watch>> watches_;
  std::unordered_map<int, uint64_t> watch_of_fd_;
  std::map<std::pair<int64_t, TimerId>, Task> timers_;  // by deadline
  std::unordered_map<TimerId, int64_t> timer_deadlines_;
  std::vector<Task> deferred_;
  bool stopping_ = false;

  std::mutex posted_mutex_;
  std::vector<Task> posted_;  // guarded by posted_mutex_
};

}  // namespace polykv::daemon
