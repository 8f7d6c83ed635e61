// The driver's side of one agent process: started, told to go on, read, and ended.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/fd.h"
#include "common/result.h"

namespace polykv::example {

/// Owns the process: the destructor kills and reaps it if it still runs. Not thread-safe.
class AgentProcess {
 public:
  /// Starts this very program with the given arguments.
  static Result<AgentProcess> start(const std::vector<std::string>& arguments);
  AgentProcess(AgentProcess&& other) noexcept;
  AgentProcess& operator=(AgentProcess&&) = delete;
  ~AgentProcess();

  pid_t pid() const { return pid_; }
  /// Its next line, which must be of that event. An "error" line becomes a failing Status; so does
  /// its death.
  Result<nlohmann::json> expect(const std::string& event);
  Status tell(const std::string& word);
  /// Tells it to exit, and waits. ERR_INTERNAL when its exit code is not 0.
  Status finish();

 private:
  AgentProcess() = default;
  struct FileCloser {
    void operator()(FILE* file) const { std::fclose(file); }
  };
  pid_t pid_ = -1;
  UniqueFd input_;
  std::unique_ptr<FILE, FileCloser> output_;
};

/// What /proc/PID/smaps says of the mappings of sealed segments in a process.
struct PoolMappings {
  uint64_t size_bytes = 0;
  uint64_t rss_bytes = 0;
  uint64_t pss_bytes = 0;      // proportional: a page that n processes map counts 1/n
  uint64_t private_bytes = 0;  // in pages that no other process maps
};
Result<PoolMappings> pool_mappings(pid_t pid);
/// Of all mappings: in pages that no other process maps.
Result<uint64_t> private_bytes(pid_t pid);

}  // namespace polykv::example
