// How much memory the machine and the daemon's control groups have left. Reads files on each call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/result.h"

namespace polykv::daemon {

/// The name of the machine's own MemAvailable among what limits memory; the others are control
/// groups.
inline constexpr const char* kThisMachine = "this machine (MemAvailable)";

/// One thing that limits memory, and what it has left.
struct MemoryHeadroom {
  std::string name;  // for people: kThisMachine, "control group /a/b (memory.max)"
  uint64_t free_bytes = 0;
  std::string remedy;
};

struct MemoryProbe {
  std::string cgroup_root = "/sys/fs/cgroup";
  std::string proc_self_cgroup = "/proc/self/cgroup";
  std::string proc_meminfo = "/proc/meminfo";

  /// MemAvailable, and each memory limit of the daemon's control group and of all its ancestors,
  /// v1 (memory.limit_in_bytes) and v2 (memory.max, memory.high). File pages that the kernel can
  /// drop at once count as free. What cannot be read limits nothing, except MemAvailable:
  /// POLYKV_ERR_SYSTEM.
  Result<std::vector<MemoryHeadroom>> measure() const;
};

}  // namespace polykv::daemon
