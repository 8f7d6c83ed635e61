// Threads that wait between calls, so that a call of a fraction of a millisecond need not start any.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace polykv::lib {

/// Starts threads when they are first asked for and keeps them until it goes. They take no signals.
class WorkerTeam {
 public:
  WorkerTeam();
  /// In a child of fork(), where its threads are not, it leaves what belonged to them.
  ~WorkerTeam();
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  /// Runs `work` on the calling thread and on up to `helper_count` others at once; returns when all
  /// are done. With fewer where the system gives no more, and on the caller alone while another
  /// call runs: `work` takes its share from what is left to do. It must not throw.
  void run(size_t helper_count, const std::function<void()>& work);

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable started;
    std::condition_variable done;
    uint64_t round = 0;
    size_t wanted = 0;   // helpers that may still join this round
    size_t running = 0;  // helpers in it
    const std::function<void()>* work = nullptr;
    bool is_ending = false;
  };
  static void help(State& state);
  void start(size_t helper_count);

  std::mutex one_call_;
  std::unique_ptr<State> state_ = std::make_unique<State>();
  std::unique_ptr<std::vector<std::thread>> threads_ = std::make_unique<std::vector<std::thread>>();
  uint64_t generation_;  // see process.h
};

}  // namespace polykv::lib
