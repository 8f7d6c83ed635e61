#include "daemon/device_start.h"

#include "daemon/event_loop.h"
#include "daemon/log.h"
#include "device/library.h"
#include "device/probe.h"

namespace polykv::daemon {

namespace {

constexpr int64_t kRetryMs = 500;
constexpr int64_t kAutomaticWaitMs = 2000;

Result<StartedDevice> find_device(const Options& options, device::Runtime& runtime) {
  StartedDevice started;
  started.runtime = &runtime;
  POLYKV_ASSIGN_OR_RETURN(started.versions, runtime.versions());
  POLYKV_ASSIGN_OR_RETURN(const std::vector<device::DeviceInfo> devices, runtime.devices());
  std::string known;
  for (size_t i = 0; i < devices.size(); ++i) {
    const std::string uuid = device::uuid_text(devices[i].uuid);
    known += (known.empty() ? "" : ", ") + uuid + " (" + devices[i].name + ")";
    if (!options.cuda_device.empty() && options.cuda_device != uuid) continue;
    started.index = static_cast<int>(i);
    started.info = devices[i];
    return started;
  }
  if (devices.empty()) return {POLYKV_ERR_UNSUPPORTED, "count GPUs: there is none; see nvidia-smi"};
  return {POLYKV_ERR_WRONG_DEVICE, "find the GPU " + options.cuda_device + ": there is " + known +
                                       "; set cuda.device and see CUDA_VISIBLE_DEVICES"};
}

/// The driver's module may be loaded after us.
Result<StartedDevice> wait_for_device(
    const Options& options, const std::function<bool(int64_t, const std::string&)>& pause) {
  POLYKV_ASSIGN_OR_RETURN(device::Runtime* const runtime,
                          device::load_runtime(options.cuda_library));
  // What may do without a GPU does not keep its users waiting for one that is perhaps not there.
  const int64_t wait_ms = options.backing == BackingKind::automatic
                              ? std::min(options.cuda_wait_ms, kAutomaticWaitMs)
                              : options.cuda_wait_ms;
  const int64_t give_up_ms = EventLoop::now_ms() + wait_ms;
  while (true) {
    Result<StartedDevice> found = find_device(options, *runtime);
    const int64_t left_ms = give_up_ms - EventLoop::now_ms();
    // Another GPU than those that are there does not come by waiting.
    if (found || left_ms <= 0 || found.status().code() == POLYKV_ERR_WRONG_DEVICE) return found;
    if (!pause(std::min(kRetryMs, left_ms), found.status().message()))
      return {POLYKV_ERR_CANCELLED, "wait for the GPU: told to stop"};
  }
}

}  // namespace

Result<DeviceChoice> choose_device(const Options& options,
                                   const std::function<bool(int64_t, const std::string&)>& pause) {
  if (options.backing == BackingKind::memfd) return DeviceChoice{};
  Result<StartedDevice> device = wait_for_device(options, pause);
  Status status = device.status();
  if (status.code() == POLYKV_ERR_CANCELLED) return status;
  if (status.is_ok()) {
    status =
        device::probe_device(*device->runtime, device->index, device->info, options.cuda_library);
  }
  if (status.is_ok()) return DeviceChoice{*device, ""};
  status = status.with_context("keep documents in GPU memory");
  if (options.backing == BackingKind::automatic) {
    log_warning("%s; documents are kept in host memory", status.message().c_str());
    return DeviceChoice{std::nullopt, status.message()};
  }
  return Status(status.code(), status.message() +
                                   "; keep them in host memory with --backing memfd, or with "
                                   "--backing auto where this fails");
}

}  // namespace polykv::daemon
