#include "kernels/cuda/library.h"

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.h"

namespace polykv::cuda {

namespace {

class DeviceKernels final : public Kernels {
 public:
  Status encode(const KvSource& source, const LayerSlot& slot, const Workspace& workspace,
                EncodeOutcome* outcome, void* stream) override {
    return cuda::encode(source, slot, workspace, outcome, stream);
  }
  Status decode(const LayerView& layer, const DecodeTarget& target, void* stream) override {
    return cuda::decode(layer, target, stream);
  }
  Result<uint64_t> attend_workspace_bytes(const AttendCall& call) override {
    POLYKV_ASSIGN_OR_RETURN(const uint32_t count, multiprocessor_count());
    return plan_attend(call, count).workspace_bytes;
  }
  Status attend(const AttendCall& call, const Workspace& workspace, void* stream) override {
    POLYKV_ASSIGN_OR_RETURN(const uint32_t count, multiprocessor_count());
    return cuda::attend(call, workspace, count, stream);
  }
  Status checksum(std::span<const ChecksumRange> ranges, uint64_t* sums, void* stream) override {
    return cuda::checksum(ranges, sums, stream);
  }

 private:
  static Result<uint32_t> multiprocessor_count() {
    int device = 0;
    int count = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) return static_cast<uint32_t>(count);
    return {POLYKV_ERR_SYSTEM,
            format("ask the device for its multiprocessors: %s; see polykvctl doctor",
                   cudaGetErrorString(error))};
  }
};

}  // namespace

}  // namespace polykv::cuda

extern "C" __attribute__((visibility("default"))) polykv::cuda::Kernels* polykv_device_kernels(
    uint32_t version) {
  static polykv::cuda::DeviceKernels kernels;
  return version == polykv::cuda::kKernelsVersion ? &kernels : nullptr;
}
