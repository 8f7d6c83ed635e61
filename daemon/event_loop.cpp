#include "daemon/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>

namespace polykv::daemon {

Result<std::unique_ptr<EventLoop>> EventLoop::create() {
  std::unique_ptr<EventLoop> loop(new EventLoop);
  loop->epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!loop->epoll_) return system_error("create an epoll descriptor", errno, "see RLIMIT_NOFILE");
  loop->wakeup_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!loop->wakeup_) return system_error("create an event descriptor", errno, "see RLIMIT_NOFILE");
  EventLoop* self = loop.get();
  POLYKV_RETURN_IF_ERROR(
      loop->watch(loop->wakeup_.get(), EPOLLIN, [self](uint32_t) { self->run_posted(); }));
  return loop;
}

EventLoop::~EventLoop() = default;

int64_t EventLoop::now_ms() {
  using std::chrono::steady_clock;
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             steady_clock::now().time_since_epoch())
      .count();
}

Status EventLoop::watch(int fd, uint32_t events, Callback callback) {
  assert(fd >= 0 && !watch_of_fd_.contains(fd));
  const uint64_t id = next_id_++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return system_error("watch a descriptor", errno, "see fs.epoll.max_user_watches");
  watches_.emplace(id, std::make_shared<Watch>(Watch{fd, std::move(callback)}));
  watch_of_fd_.emplace(fd, id);
  return Status::ok();
}

void EventLoop::rewatch(int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = watch_of_fd_.at(fd);
  [[maybe_unused]] const int result = ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
  assert(result == 0 && "the descriptor is watched");
}

void EventLoop::unwatch(int fd) {
  const auto found = watch_of_fd_.find(fd);
  if (found == watch_of_fd_.end()) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  watches_.erase(found->second);
  watch_of_fd_.erase(found);
}

EventLoop::TimerId EventLoop::add_timer(int64_t delay_ms, Task task) {
  const TimerId id = next_id_++;
  const int64_t deadline = now_ms() + std::max<int64_t>(delay_ms, 0);
  timers_.emplace(std::pair(deadline, id), std::move(task));
  timer_deadlines_.emplace(id, deadline);
  return id;
}

void EventLoop::cancel_timer(TimerId id) {
  const auto found = timer_deadlines_.find(id);
  if (found == timer_deadlines_.end()) return;
  timers_.erase({found->second, id});
  timer_deadlines_.erase(found);
}

void EventLoop::defer(Task task) {
  deferred_.push_back(std::move(task));
}

void EventLoop::post(Task task) {
  {
    const std::lock_guard lock(posted_mutex_);
    posted_.push_back(std::move(task));
  }
  // Only a full counter could fail, and then the loop is going to wake up anyway.
  ::eventfd_write(wakeup_.get(), 1);
}

void EventLoop::run_deferred() {
  while (!deferred_.empty()) {
    std::vector<Task> tasks;
    tasks.swap(deferred_);
    for (Task& task : tasks) task();
  }
}

void EventLoop::run_posted() {
  eventfd_t count = 0;
  ::eventfd_read(wakeup_.get(), &count);
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(posted_mutex_);
    tasks.swap(posted_);
  }
  for (Task& task : tasks) {
    task();
    run_deferred();
  }
}

void EventLoop::run_timers() {
  const int64_t now = now_ms();
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    auto node = timers_.extract(timers_.begin());
    timer_deadlines_.erase(node.key().second);
    node.mapped()();
    run_deferred();
  }
}

int EventLoop::wait_ms() const {
  if (timers_.empty()) return -1;
  return static_cast<int>(std::clamp<int64_t>(timers_.begin()->first.first - now_ms(), 0, INT_MAX));
}

void EventLoop::run() {
  std::array<epoll_event, 64> events;
  run_deferred();
  while (!stopping_) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), wait_ms());
    assert((count >= 0 || errno == EINTR) && "the epoll descriptor is ours");
    for (int i = 0; i < count && !stopping_; ++i) {
      const auto& event = events[static_cast<size_t>(i)];
      const auto found = watches_.find(event.data.u64);
      if (found == watches_.end()) continue;
      const std::shared_ptr<Watch> watch = found->second;  // survives its own unwatch
      watch->callback(event.events);
      run_deferred();
    }
    if (!stopping_) run_timers();
  }
}

void EventLoop::stop() {
  stopping_ = true;
}

}  // namespace polykv::daemon
