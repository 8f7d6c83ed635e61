// The GPU that documents are to be kept on: found, waited for, and tried before anybody relies on it.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "daemon/options.h"
#include "device/runtime.h"

namespace polykv::daemon {

struct StartedDevice {
  device::Runtime* runtime = nullptr;  // lives as long as the process
  int index = 0;                       // of runtime->devices()
  device::DeviceInfo info;
  device::Versions versions;
};

/// What --backing came to.
struct DeviceChoice {
  std::optional<StartedDevice> device;  // none: host memory
  std::string note;                     // why it is host memory although a GPU was asked for
};

/// Loads the library, waits for the driver and the configured GPU for at most options.cuda_wait_ms,
/// and tries whether another process can open what this one exports. `pause(ms, why)` waits and says
/// why; false: give up. With backing `automatic` a failure is a note, with `cuda` it is an error,
/// both with their cause.
Result<DeviceChoice> choose_device(const Options& options,
                                   const std::function<bool(int64_t, const std::string&)>& pause);

}  // namespace polykv::daemon
