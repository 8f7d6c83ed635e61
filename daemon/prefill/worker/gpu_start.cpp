#include "daemon/prefill/worker/gpu_start.h"

#include <cstdlib>

#include "daemon/prefill/transformer/tensor_pass.h"
#include "daemon/prefill/worker/host_computer.h"
#include "libclient/cuda/kernel_calls.h"

namespace polykv {

Status use_gpu_once(const GpuPlace& gpu) {
  const DevicePlace& place = gpu.place;
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
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
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
  POLYKV_RETURN_IF_ERROR(lib::client_kernels().status());
  POLYKV_ASSIGN_OR_RETURN(gpu.place.torch, torch_gpu(gpu.place.index));
  POLYKV_RETURN_IF_ERROR(use_gpu_once(gpu));
  return gpu;
}

}  // namespace

Result<ChosenComputer> choose_computer(const ComputerSettings& settings) {
  ChosenComputer chosen;
  std::string host = settings.host_description;
  if (settings.device != WorkerDevice::cpu) {
    Result<GpuPlace> gpu = start_gpu(settings);
    if (gpu.is_ok()) {
      chosen.gpu = *gpu;
      chosen.computer = std::make_unique<GpuComputer>(
          *gpu, settings.documents_on_gpu, settings.thread_count,
          gpu->info.name + " (" + device::uuid_text(gpu->info.uuid) + ")");
      return chosen;
    }
    if (settings.device == WorkerDevice::cuda)
      return gpu.status().with_context("compute on a GPU (worker.device is cuda)");
    host += "; no GPU: " + gpu.status().message();
  }
  chosen.computer = std::make_unique<HostComputer>(settings.documents_on_gpu, settings.thread_count,
                                                   std::move(host));
  return chosen;
}

}  // namespace polykv
