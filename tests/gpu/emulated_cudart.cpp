// What gpu_bench asks of the CUDA runtime and of the kernels, in host memory: so that the program itself is run, and its
// checks pass, where there is no GPU. Its times mean nothing then.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

#include "kernels/cuda/launch.h"
#include "tests/cuda_emulation/emulated_calls.h"

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "Emulated GPU");
  properties->multiProcessorCount = 2;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "emulated";
}
cudaError_t cudaMalloc(void** memory, size_t size_bytes) {
  *memory = std::aligned_alloc(256, (size_bytes + 255) / 256 * 256);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, size_t size_bytes) {
  std::memset(memory, value, size_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size_bytes, cudaMemcpyKind) {
  std::memcpy(to, from, size_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, size_bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = nullptr;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
  return cudaSuccess;
}

}  // extern "C"

namespace polykv::cuda {

Status encode(const KvSource& source, const LayerSlot& slot, const Workspace& workspace,
              EncodeOutcome* outcome, void*) {
  return test::run_encode(source, slot, workspace, outcome);
}
Status decode(const LayerView& layer, const DecodeTarget& target, void*) {
  return test::run_decode(layer, target);
}
Status attend(const AttendCall& call, const Workspace& workspace, uint32_t multiprocessor_count,
              void*) {
  return test::run_attend(call, workspace, multiprocessor_count);
}
Status checksum(std::span<const ChecksumRange> ranges, uint64_t* sums, void*) {
  return test::run_checksum(ranges, sums);
}

}  // namespace polykv::cuda
