// Times, and work on several threads.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace polykv::bench {

double median_of(std::vector<double> values);

/// What seconds_of counts. On a machine that does other work as well, the processor time of this
/// process says more than the time that passes.
enum class Clock { wall, cpu };
void use_clock(Clock clock);  // before anything is measured

/// Of work that keeps `thread_count` threads busy.
double seconds_of(uint32_t thread_count, const std::function<void()>& work);

/// Calls work(0) .. work(count - 1), each on a thread of its own, the last on the caller's. An
/// exception of one of them is thrown again here.
void on_threads(uint32_t count, const std::function<void(uint32_t)>& work);

}  // namespace polykv::bench
