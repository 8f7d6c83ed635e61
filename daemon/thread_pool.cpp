#include "daemon/thread_pool.h"

namespace polykv::daemon {

ThreadPool::ThreadPool(EventLoop& loop, unsigned thread_count) : loop_(loop) {
  for (unsigned i = 0; i < thread_count; ++i) threads_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    jobs_.clear();
  }
  wakeup_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::enqueue(Job job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  wakeup_.notify_one();
}

void ThreadPool::work() {
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      wakeup_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    loop_.post(job());
  }
}

}  // namespace polykv::daemon
