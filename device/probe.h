// Whether device memory can be shared between processes here: asked by really doing it,
// because nothing else tells (WSL2, MIG and some containers have a working CUDA without it).
#pragma once

#include <string>
#include <vector>

#include "common/result.h"
#include "device/runtime.h"

namespace polykv::device {

/// Exports an allocation to a spawned helper (this program, executed anew: a CUDA context does not
/// survive fork), which opens it, reads what we wrote and answers into it. Waits at most 30 seconds.
/// POLYKV_ERR_UNSUPPORTED names the cause and what is known to cause it.
///
/// For programs whose main() runs the helper; `index` and `info` are of runtime.devices(), `library`
/// is what the runtime was loaded from. Leaves the device current for the calling thread.
Status probe_device(Runtime& runtime, int index, const DeviceInfo& info,
                    const std::string& library);

/// The helper: a program's first argument, and what it does with those behind it. Prints one line.
inline constexpr const char* kProbeFlag = "--probe-device";
int run_probe_helper(const std::vector<std::string>& arguments);

/// What is known to make sharing fail, the likely ones first.
struct Surroundings {
  std::string kernel_version;  // /proc/version
  std::string device_name;
  bool is_container = false;
};
std::string causes_of_failure(const Surroundings& surroundings);

}  // namespace polykv::device
