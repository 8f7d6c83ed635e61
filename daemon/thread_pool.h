// A few threads for slow work (allocation, sealing, checksums, hashing). Results come back as
// events.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "daemon/event_loop.h"

namespace polykv::daemon {

/// submit() is for the loop's thread. The number of waiting jobs is bounded by the callers: each
/// belongs to a request, and those are limited per session. The destructor finishes the running
/// jobs and drops the others.
class ThreadPool {
 public:
  ThreadPool(EventLoop& loop, unsigned thread_count);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// `work` runs on a pool thread and must own or copy what it uses; then `done(result)` runs on
  /// the loop's thread, which must look up anew whatever may have ended since.
  template <typename T>
  void submit(std::function<T()> work, std::function<void(T)> done) {
    enqueue([work = std::move(work), done = std::move(done)]() -> EventLoop::Task {
      auto result = std::make_shared<T>(work());
      return [done, result] { done(std::move(*result)); };
    });
  }

 private:
  using Job = std::function<EventLoop::Task()>;
  void enqueue(Job job);
  void work();

  EventLoop& loop_;
  std::mutex mutex_;
  std::condition_variable wakeup_;
  std::deque<Job> jobs_;   // guarded by mutex_
  bool stopping_ = false;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace polykv::daemon
