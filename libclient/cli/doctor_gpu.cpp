#include <filesystem>

#include "device/probe.h"
#include "libclient/cli/doctor.h"
#include "libclient/cuda/opened_memory.h"

namespace polykv::cli {

namespace {

std::string version_text(int number) {
  return cuda_version(static_cast<uint32_t>(number));
}

/// Without a library that works, what the machine says of a GPU by itself.
Finding without_library(const Status& why) {
  const std::string driver = first_line("/proc/driver/nvidia/version");
  std::error_code ignored;
  if (driver.empty() && !std::filesystem::exists("/dev/nvidiactl", ignored) &&
      !std::filesystem::exists("/dev/dxg", ignored)) {
    return {"gpu", Health::info, "no NVIDIA driver; documents are kept in host memory", ""};
  }
  return {"gpu", Health::warning,
          (driver.empty() ? "an NVIDIA device" : driver) + "; " + why.message(),
          "documents cannot be kept in GPU memory, nor read there"};
}

Finding describe(device::Runtime& runtime, const lib::Gpu& gpu, const device::Versions& versions) {
  std::string detail = device::uuid_text(gpu.info.uuid) + " " + gpu.info.name;
  Status status = runtime.use_device(gpu.index);
  if (status.is_ok()) {
    const auto memory = runtime.memory();
    status = memory.status();
    if (memory.is_ok()) {
      detail += ", " + human_bytes(memory->free_bytes) + " of " + human_bytes(memory->total_bytes) +
                " free";
    }
  }
  detail += ", driver for CUDA " + version_text(versions.driver) + ", runtime " +
            version_text(versions.runtime);
  if (status.is_ok()) return {"gpu", Health::good, detail, ""};
  return {"gpu", Health::problem, detail + ": " + status.message(), "see nvidia-smi",
          status.code()};
}

Finding check_sharing(device::Runtime& runtime, const lib::Gpu& gpu) {
  const Status shared = device::probe_device(runtime, gpu.index, gpu.info, lib::client_library());
  const std::string what = device::uuid_text(gpu.info.uuid);
  if (shared.is_ok()) {
    return {"gpu sharing", Health::good, what + ": another process opened and wrote its memory",
            ""};
  }
  return {"gpu sharing", Health::warning, what + ": " + shared.message(),
          "documents are kept in host memory there (polykvd --backing memfd)"};
}

}  // namespace

std::vector<Finding> check_gpu() {
  const Result<device::Runtime*> runtime = lib::client_runtime(0);
  if (!runtime.is_ok()) return {without_library(runtime.status())};
  const auto versions = (*runtime)->versions();
  const auto devices = (*runtime)->devices();
  if (!versions.is_ok()) return {without_library(versions.status())};
  if (!devices.is_ok()) return {without_library(devices.status())};
  std::vector<Finding> findings;
  for (size_t i = 0; i < devices->size(); ++i) {
    const lib::Gpu gpu{*runtime, static_cast<int>(i), (*devices)[i]};
    findings.push_back(describe(**runtime, gpu, *versions));
    findings.push_back(check_sharing(**runtime, gpu));
  }
  if (findings.empty()) findings.push_back({"gpu", Health::info, "the driver sees no GPU", ""});
  return findings;
}

}  // namespace polykv::cli
