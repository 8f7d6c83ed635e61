// Deadlines by CLOCK_MONOTONIC.
#pragma once

#include <chrono>
#include <cstdint>

namespace polykv::lib {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

inline constexpr Deadline kNoDeadline = Deadline::max();

/// timeout_ms from now; negative: without limit. Beyond a year counts as without limit, so that
/// sums cannot overflow.
inline Deadline deadline_after_ms(int64_t timeout_ms) {
  constexpr int64_t kYearMs = int64_t{366} * 24 * 3600 * 1000;
  if (timeout_ms < 0 || timeout_ms > kYearMs) return kNoDeadline;
  return Clock::now() + std::chrono::milliseconds(timeout_ms);
}

/// For poll(2): rounded up, so that a wait never ends early; -1 without a deadline.
inline int poll_timeout_ms(Deadline deadline) {
  if (deadline == kNoDeadline) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  constexpr int64_t kMost = 1 << 30;
  return static_cast<int>(left < 0 ? 0 : left > kMost ? kMost : left);
}

}  // namespace polykv::lib
