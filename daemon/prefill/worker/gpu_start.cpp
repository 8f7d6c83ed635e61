#include "daemon/prefill/worker/gpu_start.h"

#include <cstdlib>

#include "daemon/prefill/transformer/tensor_pass.h"
#include "daemon/prefill/worker/host_computer.h"
#include "libclient/cuda/kernel_calls.h"

namespace polykv {

Status use_gpu_once(const GpuPlace& gpu) {
  const DevicePlace& place = gpu.place;
  // What libclient asks before it opens or encodes.
  POLYKV_RETURN_IF_ERROR(lib::client_runtime(0).status());
  POLYKV_RETURN_IF_ERROR(lib::find_gpu(*place.runtime, gpu.info.uuid).status());
  POLYKV_RETURN_IF_ERROR(lib::client_kernels().status());
  POLYKV_RETURN_IF_ERROR(warm_up_tensors(place.torch));
  POLYKV_ASSIGN_OR_RETURN(
      const DeviceMemory memory,
      DeviceMemory::allocate(place, device::kGranularityBytes, "a look at the GPU"));
  uint64_t value = 0;
  POLYKV_RETURN_IF_ERROR(place.runtime->zero(memory.pointer(), sizeof value));
  POLYKV_RETURN_IF_ERROR(place.runtime->copy_to_device(memory.pointer(), &value, sizeof value));
  POLYKV_RETURN_IF_ERROR(place.runtime->copy_to_host(&value, memory.pointer(), sizeof value));
  return place.runtime->synchronize_stream(nullptr);
}

namespace {

Result<GpuPlace> start_gpu(const ComputerSettings& settings) {
  POLYKV_RETURN_IF_ERROR(load_torch_gpu());  // first: without it the driver need not be woken
  // Of this process alone, whose other threads are idle. libclient looks for its library there; kernels are loaded when their
  // library is, because what is loaded later may open files; and products in TF32 stay off whatever the machine's
  // settings are, which the documents' identity rests on.
  if (!settings.cuda_library.empty())
    ::setenv("POLYKV_CUDA_LIBRARY", settings.cuda_library.c_str(), 1);
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  ::setenv("NVIDIA_TF32_OVERRIDE", "0", 1);
  POLYKV_ASSIGN_OR_RETURN(device::Runtime* const runtime, lib::client_runtime(0));
  POLYKV_ASSIGN_OR_RETURN(const std::vector<device::DeviceInfo> devices, runtime->devices());
  GpuPlace gpu;
  gpu.place.runtime = runtime;
  size_t index = 0;
  while (index < devices.size() && !settings.gpu_uuid.empty() &&
         device::uuid_text(devices[index].uuid) != settings.gpu_uuid) {
    ++index;
  }
  if (index >= devices.size()) {
    return {POLYKV_ERR_WRONG_DEVICE,
            "use a GPU: " +
                (settings.gpu_uuid.empty()
                     ? "there is none"
                     : settings.gpu_uuid + " is not among those that this process sees") +
                "; see nvidia-smi -L and CUDA_VISIBLE_DEVICES"};
  }
  gpu.info = devices[index];
  gpu.place.index = static_cast<int>(index);
  POLYKV_ASSIGN_OR_RETURN(gpu.place.torch, torch_gpu(gpu.place.index));
  POLYKV_RETURN_IF_ERROR(use_gpu_once(gpu));
  return gpu;
}

Status unless_automatic(const ComputerSettings& settings, const Status& no_gpu) {
  if (settings.device != WorkerDevice::cuda) return Status::ok();
  return no_gpu.with_context("compute on a GPU (worker.device is cuda)");
}

/// no_gpu: why not on a GPU, if one was looked for.
std::unique_ptr<Computer> host_computer(const ComputerSettings& settings, const Status& no_gpu) {
  std::string description = settings.host_description;
  if (!no_gpu.is_ok()) description += "; no GPU: " + no_gpu.message();
  return std::make_unique<HostComputer>(settings.documents_on_gpu, settings.thread_count,
                                        std::move(description));
}

}  // namespace

Result<ChosenComputer> choose_computer(const ComputerSettings& settings) {
  ChosenComputer chosen;
  Status no_gpu;
  if (settings.device != WorkerDevice::cpu) {
    const Result<GpuPlace> gpu = start_gpu(settings);
    if (gpu.is_ok()) {
      chosen.gpu = *gpu;
      chosen.computer = std::make_unique<GpuComputer>(
          *gpu, settings.documents_on_gpu, settings.thread_count,
          gpu->info.name + " (" + device::uuid_text(gpu->info.uuid) + ")");
      return chosen;
    }
    no_gpu = gpu.status();
    POLYKV_RETURN_IF_ERROR(unless_automatic(settings, no_gpu));
  }
  chosen.computer = host_computer(settings, no_gpu);
  return chosen;
}

Status look_from_inside(const ComputerSettings& settings, ChosenComputer& chosen) {
  if (!chosen.gpu) return Status::ok();
  Status used = use_gpu_once(*chosen.gpu).with_context("use it inside the sandbox");
  if (used.is_ok()) return used;
  POLYKV_RETURN_IF_ERROR(unless_automatic(settings, used));
  chosen.computer = host_computer(settings, used);
  return Status::ok();
}

}  // namespace polykv
