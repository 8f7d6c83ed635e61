// Reads a document's text out of a descriptor that a client opened: with a byte cap, a deadline,
// and no trust in what the descriptor is.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "common/result.h"

namespace polykv {

struct TextLimits {
  uint64_t max_bytes = uint64_t{64} << 20;
  int64_t deadline_ms = 60'000;  // for all of it, CLOCK_MONOTONIC
};

/// A regular file or memfd is read by pread from its start (its position is shared with the client
/// and stays as it is); a pipe or socket to its end. `alive` (may be empty) is called at least once
/// a second and between reads; false gives up with ERR_CANCELLED. Errors name `what`: ERR_LIMIT
/// (longer than max_bytes), ERR_TIMEOUT, ERR_INVALID_ARGUMENT (a directory, a device), ERR_SYSTEM.
Result<std::string> read_text(int fd, const std::string& what, const TextLimits& limits,
                              const std::function<bool()>& alive = {});

}  // namespace polykv
