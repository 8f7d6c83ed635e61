// doctor: each check looks at one thing and never changes anything.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "libclient/cli/command.h"

namespace polykv::cli {

enum class Health {
  good,     // as it should be
  info,     // a fact
  warning,  // works, but slower or with less room than it could
  problem,  // something polykv needs is missing
};

struct Finding {
  std::string check;
  Health health = Health::info;
  std::string detail;
  std::string remedy;                           // empty unless warning or problem
  polykv_status code = POLYKV_ERR_UNSUPPORTED;  // of a problem: the exit code if it is the first
};

/// The processor, the kernel, its limits and memory.
std::vector<Finding> check_machine();
/// The NVIDIA driver, its GPUs, and whether they share memory between processes.
std::vector<Finding> check_gpu();
/// The daemon's socket, the daemon, polykv-prefill and the BLAS it gets.
std::vector<Finding> check_polykv(const Global& global);

/// The first line of a file without its newline; empty when it cannot be read.
std::string first_line(const std::string& path);

}  // namespace polykv::cli
