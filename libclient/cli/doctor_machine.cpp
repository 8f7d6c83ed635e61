#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "common/memfd.h"
#include "kernels/cpu_choice.h"
#include "libclient/cli/doctor.h"

// Linux 6.5; Debian 12's headers do not have it.
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace polykv::cli {

namespace {

Finding check_cpu() {
  std::string features;
  const auto add = [&](const char* name, bool has) {
    if (has) features += std::string(features.empty() ? "" : " ") + name;
  };
#if defined(__x86_64__)
  add("avx2", __builtin_cpu_supports("avx2"));
  add("fma", __builtin_cpu_supports("fma"));
  add("avx512f", __builtin_cpu_supports("avx512f"));
  add("avx512bw", __builtin_cpu_supports("avx512bw"));
  add("avx512vnni", __builtin_cpu_supports("avx512vnni"));
  add("avx512vbmi", __builtin_cpu_supports("avx512vbmi"));
  add("avx512bf16", __builtin_cpu_supports("avx512bf16"));
#endif
  if (const char* unknown = unknown_cpu_choice()) {
    return {"cpu", Health::warning,
            std::string("POLYKV_CPU is '") + unknown + "', which means nothing and is ignored",
            "unset it, or say avx2, baseline or reference"};
  }
  if (cpu_choice() == CpuChoice::reference) {
    return {"cpu", Health::warning, "POLYKV_CPU=reference: the slow, obvious codecs are in use",
            "unset POLYKV_CPU"};
  }
  const bool wide = features.find("avx2") != std::string::npos;
  return {"cpu", wide ? Health::good : Health::warning,
          features.empty() ? "no vector extension that polykv uses" : features,
          wide ? "" : "decoding is slow without AVX2; use a newer processor"};
}

Finding check_kernel() {
  utsname name{};
  ::uname(&name);
  unsigned major = 0;
  unsigned minor = 0;
  const bool parsed = std::sscanf(name.release, "%u.%u", &major, &minor) == 2;
  const bool tested = parsed && (major > 6 || (major == 6 && minor >= 1));
  return {"kernel", tested ? Health::good : Health::warning,
          std::string(name.sysname) + " " + name.release,
          tested ? "" : "polykv is tested on Linux 6.1 and later"};
}

/// The property that everything rests on: after the seal nobody can write.
Finding check_sealing() {
  const auto bad = [](const std::string& what) {
    return Finding{"sealed memory", Health::problem, what,
                   "polykv needs memfd_create with sealing (Linux 3.17); is it a sandbox that "
                   "forbids it?"};
  };
  Result<UniqueFd> fd = memfd_create_sealable("polykv-doctor");
  if (!fd.is_ok()) return bad(fd.status().message());
  if (::ftruncate(fd->get(), 4096) != 0 ||
      ::fcntl(fd->get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) != 0) {
    return bad("a memfd could not be sealed");
  }
  void* writable = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0);
  if (writable != MAP_FAILED) {
    ::munmap(writable, 4096);
    return bad("a sealed memfd could be mapped writable");
  }
  void* readable = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd->get(), 0);
  if (readable == MAP_FAILED) return bad("a sealed memfd could not be mapped read-only");
  ::munmap(readable, 4096);
  const std::string noexec = first_line("/proc/sys/vm/memfd_noexec");
  return {
      "sealed memory", Health::good,
      noexec.empty() ? "memfds can be sealed" : "memfds can be sealed; vm.memfd_noexec=" + noexec,
      ""};
}

Finding check_pidfd() {
  const UniqueFd own(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!own) {
    return {"pidfd", Health::problem,
            "pidfd_open fails: " + system_error("pidfd_open", errno).message(),
            "polykv needs Linux 5.3 and a sandbox that allows pidfd_open"};
  }
  int ends[2];
  bool from_kernel = false;
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0) {
    const UniqueFd first(ends[0]);
    const UniqueFd second(ends[1]);
    int peer = -1;
    socklen_t size = sizeof peer;
    from_kernel = ::getsockopt(ends[0], SOL_SOCKET, SO_PEERPIDFD, &peer, &size) == 0;
    if (from_kernel) ::close(peer);
  }
  return {"pidfd", Health::good,
          from_kernel ? "the kernel names a peer by pidfd (SO_PEERPIDFD)"
                      : "the client's own pidfd is used (no SO_PEERPIDFD before Linux 6.5)",
          ""};
}

Finding check_user() {
  constexpr uid_t kOverflowUid = 65534;
  const uid_t uid = ::geteuid();
  if (uid != kOverflowUid) return {"user", Health::info, format("user id %u", uid), ""};
  return {"user", Health::problem, "user id 65534 stands for users without an id here",
          "map your user into this user namespace, or run as another user", POLYKV_ERR_PERMISSION};
}

uint64_t meminfo_bytes(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key + ":")) continue;
    return std::strtoull(line.c_str() + key.size() + 1, nullptr, 10) * 1024;
  }
  return 0;
}

/// The tightest memory limit of this process's control group and all above it; 0: none.
uint64_t cgroup_limit_bytes() {
  uint64_t least = 0;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && controllers.find("memory") == std::string::npos) continue;
    const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    const char* file = unified ? "memory.max" : "memory.limit_in_bytes";
    std::filesystem::path path = line.substr(second + 1);
    for (;; path = path.parent_path()) {
      const std::string value = first_line(root + path.string() + "/" + file);
      const uint64_t bytes = std::strtoull(value.c_str(), nullptr, 10);
      // v1 says "none" with a number near 2^63.
      if (bytes != 0 && bytes < (uint64_t{1} << 62))
        least = least == 0 ? bytes : std::min(least, bytes);
      if (!path.has_relative_path()) break;
    }
  }
  return least;
}

Finding check_memory() {
  const uint64_t total = meminfo_bytes("MemTotal");
  const uint64_t available = meminfo_bytes("MemAvailable");
  const uint64_t limit = cgroup_limit_bytes();
  constexpr uint64_t kLittle = uint64_t{1} << 30;
  const bool is_little = available < kLittle || (limit != 0 && limit < kLittle);
  return {
      "memory", is_little ? Health::warning : Health::good,
      human_bytes(available) + " of " + human_bytes(total) + " available" +
          (limit == 0 ? ", no control group limit here"
                      : ", this control group is limited to " + human_bytes(limit)),
      is_little ? "documents and polykv-prefill need room; free memory or raise the limit" : ""};
}

Finding check_descriptors() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  constexpr rlim_t kEnough = 1024;
  const bool enough = limit.rlim_cur >= kEnough;
  return {
      "descriptors", enough ? Health::good : Health::warning,
      format("RLIMIT_NOFILE %llu, at most %llu", static_cast<unsigned long long>(limit.rlim_cur),
             static_cast<unsigned long long>(limit.rlim_max)),
      enough ? "" : "raise it: ulimit -n 1024, or LimitNOFILE= in the unit"};
}

Finding check_mappings() {
  const std::string text = first_line("/proc/sys/vm/max_map_count");
  const unsigned long long count = std::strtoull(text.c_str(), nullptr, 10);
  constexpr unsigned long long kDefault = 65530;
  const bool enough = text.empty() || count >= kDefault;
  return {"mappings", enough ? Health::good : Health::warning,
          "vm.max_map_count " + (text.empty() ? "unknown" : text),
          enough ? "" : "each segment is a mapping; sysctl vm.max_map_count=65530"};
}

}  // namespace

std::vector<Finding> check_machine() {
  return {check_cpu(),  check_kernel(), check_sealing(),     check_pidfd(),
          check_user(), check_memory(), check_descriptors(), check_mappings()};
}

}  // namespace polykv::cli
