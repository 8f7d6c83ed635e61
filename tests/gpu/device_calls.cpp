// What the conformance tests call to run kernels (tests/cuda_emulation/device_calls.h), on a real device: the same kernels,
// compiled by nvcc. Schedules are the device's own.
#include "tests/cuda_emulation/device_calls.h"

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.h"

namespace polykv::test {

namespace {

/// An error of a kernel ends the process's use of the device: the tests behind it fail as well.
Status finished(Status launched) {
  const cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return launched;
  return {POLYKV_ERR_INTERNAL, format("the kernel failed: %s", cudaGetErrorString(error))};
}

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t size_bytes) {
    if (cudaMalloc(&pointer_, size_bytes) == cudaSuccess) cudaMemset(pointer_, 0xff, size_bytes);
  }
  ~DeviceMemory() { cudaFree(pointer_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* get() const { return pointer_; }

 private:
  void* pointer_ = nullptr;
};

}  // namespace

Status emulated_decode(const LayerView& layer, const DecodeTarget& target, const Schedule&) {
  return finished(cuda::decode(layer, target, nullptr));
}

Status emulated_attend(const cuda::AttendCall& call, uint32_t multiprocessor_count,
                       const Schedule&) {
  POLYKV_RETURN_IF_ERROR(cuda::check_attend(call));
  const uint64_t size_bytes = cuda::plan_attend(call, multiprocessor_count).workspace_bytes;
  const DeviceMemory workspace(size_bytes);
  return finished(cuda::attend(call, {workspace.get(), size_bytes}, multiprocessor_count, nullptr));
}

Status emulated_encode(const KvSource& source, LayerSlot& slot, const Schedule&) {
  POLYKV_RETURN_IF_ERROR(cuda::check_encode(source, slot));
  const uint64_t size_bytes = cuda::encode_workspace_bytes(slot);
  const DeviceMemory workspace(size_bytes);
  const DeviceMemory outcome(sizeof(cuda::EncodeOutcome));
  auto* const device_outcome = static_cast<cuda::EncodeOutcome*>(outcome.get());
  POLYKV_RETURN_IF_ERROR(
      finished(cuda::encode(source, slot, {workspace.get(), size_bytes}, device_outcome, nullptr)));
  cuda::EncodeOutcome done;
  if (cudaMemcpy(&done, device_outcome, sizeof done, cudaMemcpyDeviceToHost) != cudaSuccess)
    return {POLYKV_ERR_INTERNAL, "the outcome cannot be read"};
  slot.scales = done.scales;
  return cuda::encode_status(done, slot.profile, slot.source_dtype);
}

}  // namespace polykv::test
