#include "libclient/worker_team.h"

#include <algorithm>
#include <csignal>
#include <exception>

#include "libclient/process.h"

namespace polykv::lib {

WorkerTeam::WorkerTeam() : generation_(process_generation()) {}

WorkerTeam::~WorkerTeam() {
  if (process_generation() != generation_) {
    // The mutex may be locked by a thread that is not here, and the handles may by now be those of
    // the child's own threads.
    static_cast<void>(state_.release());
    static_cast<void>(threads_.release());
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_ending = true;
  }
  state_->started.notify_all();
  for (std::thread& thread : *threads_) thread.join();
}

void WorkerTeam::help(State& state) {
  std::unique_lock lock(state.mutex);
  for (uint64_t seen = 0;;) {
    state.started.wait(
        lock, [&] { return state.is_ending || (state.round != seen && state.wanted > 0); });
    if (state.is_ending) return;
    seen = state.round;
    --state.wanted;
    ++state.running;
    lock.unlock();
    (*state.work)();
    lock.lock();
    if (--state.running == 0) state.done.notify_all();
  }
}

void WorkerTeam::start(size_t helper_count) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  // A fault of the thread itself is still the application's to handle.
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) ::sigdelset(&all, fault);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    threads_->reserve(helper_count);
    while (threads_->size() < helper_count)
      threads_->emplace_back([state = state_.get()] { help(*state); });
  } catch (const std::exception&) {
    // No more threads, or no memory for them: those that there are do it.
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void WorkerTeam::run(size_t helper_count, const std::function<void()>& work) {
  if (helper_count == 0) return work();
  const std::unique_lock one_call(one_call_, std::try_to_lock);
  if (!one_call.owns_lock()) return work();
  if (threads_->size() < helper_count) start(helper_count);
  {
    const std::lock_guard lock(state_->mutex);
    ++state_->round;
    state_->wanted = std::min(helper_count, threads_->size());
    state_->work = &work;
  }
  state_->started.notify_all();
  work();
  std::unique_lock lock(state_->mutex);
  state_->wanted = 0;  // whoever has not woken up by now is not needed
  state_->done.wait(lock, [this] { return state_->running == 0; });
}

}  // namespace polykv::lib
