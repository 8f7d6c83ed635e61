// How much memory this machine can still give, asked of /proc/meminfo through a descriptor that was
// opened before the sandbox closed. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "common/fd.h"
#include "common/result.h"

namespace polykv {

class FreeMemory {
 public:
  static Result<FreeMemory> open();
  /// Reads MemAvailable from a file in the format of /proc/meminfo.
  explicit FreeMemory(UniqueFd meminfo) : meminfo_(std::move(meminfo)) {}

  Result<uint64_t> available_bytes() const;

 private:
  UniqueFd meminfo_;
};

/// "1234 MiB", rounded up.
std::string mebibytes(uint64_t bytes);

}  // namespace polykv
