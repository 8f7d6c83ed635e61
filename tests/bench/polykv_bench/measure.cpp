#include "tests/bench/polykv_bench/measure.h"

#include <algorithm>
#include <ctime>
#include <exception>
#include <thread>

namespace polykv::bench {

namespace {

Clock used_clock = Clock::wall;

double now_s(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void use_clock(Clock clock) {
  used_clock = clock;
}

double seconds_of(uint32_t thread_count, const std::function<void()>& work) {
  const bool is_cpu = used_clock == Clock::cpu;
  const double start = now_s(is_cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC);
  work();
  const double end = now_s(is_cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC);
  return (end - start) / (is_cpu ? thread_count : 1);
}

void on_threads(uint32_t count, const std::function<void(uint32_t)>& work) {
  std::vector<std::exception_ptr> failures(count);
  const auto guarded = [&](uint32_t index) {
    try {
      work(index);
    } catch (...) {
      failures[index] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i + 1 < count; ++i) threads.emplace_back(guarded, i);
  guarded(count - 1);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace polykv::bench
