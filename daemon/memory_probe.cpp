#include "daemon/memory_probe.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

namespace polykv::daemon {

namespace {

/// The first number of a file; nothing when it is not there or says "max".
std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (!(file >> number)) return std::nullopt;
  return number;
}

/// The number behind a word at the start of a line ("inactive_file 4096", "MemAvailable: 1 kB").
std::optional<uint64_t> read_field(const std::string& path, const std::string& word) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string name;
    uint64_t number = 0;
    if (fields >> name && name == word && fields >> number) return number;
  }
  return std::nullopt;
}

struct Hierarchy {
  std::string mount;                // below which the group's path is looked up
  std::vector<const char*> limits;  // files that hold a limit
  const char* usage;
  const char* reclaimable;  // field of memory.stat
};

void measure_hierarchy(const Hierarchy& hierarchy, std::string group,
                       std::vector<MemoryHeadroom>& out) {
  // In a container the path may be that of the host; whatever levels are not here are skipped.
  while (true) {
    if (group == "/") group.clear();
    const std::string folder = hierarchy.mount + group;
    const std::optional<uint64_t> usage = read_number(folder + "/" + hierarchy.usage);
    for (const char* file : hierarchy.limits) {
      const std::optional<uint64_t> limit = read_number(folder + "/" + file);
      if (!limit || !usage) continue;
      const uint64_t reclaimable =
          read_field(folder + "/memory.stat", hierarchy.reclaimable).value_or(0);
      const uint64_t used = *usage - std::min(*usage, reclaimable);
      out.push_back({"control group " + (group.empty() ? "/" : group) + " (" + file + ")",
                     *limit - std::min(*limit, used),
                     "raise its limit (MemoryMax= of the service), or free memory in it"});
    }
    if (group.empty()) return;
    group.resize(group.rfind('/'));
  }
}

}  // namespace

Result<std::vector<MemoryHeadroom>> MemoryProbe::measure() const {
  std::vector<MemoryHeadroom> headrooms;
  const std::optional<uint64_t> available_kib = read_field(proc_meminfo, "MemAvailable:");
  if (!available_kib)
    return {POLYKV_ERR_SYSTEM, "read " + proc_meminfo + ": it has no MemAvailable; mount /proc"};
  headrooms.push_back(
      {kThisMachine, *available_kib * 1024, "end programs, or remove documents (polykvctl rm)"});
  std::ifstream file(proc_self_cgroup);
  for (std::string line; std::getline(file, line);) {
    // "hierarchy:controllers:/path"; v2 is "0::/path".
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || second + 1 >= line.size() || line[second + 1] != '/')
      continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      for (const char* mount : {"", "/unified"}) {
        measure_hierarchy(
            {cgroup_root + mount, {"memory.max", "memory.high"}, "memory.current", "inactive_file"},
            group, headrooms);
      }
    } else if (controllers.find(",memory,") != std::string::npos) {
      measure_hierarchy({cgroup_root + "/memory",
                         {"memory.limit_in_bytes"},
                         "memory.usage_in_bytes",
                         "total_inactive_file"},
                        group, headrooms);
    }
  }
  return headrooms;
}

}  // namespace polykv::daemon
