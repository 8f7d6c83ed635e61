// The device of this machine. Without one the program ends with code 77 before its first test.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <new>

#include "kernels/cuda/launch.h"
#include "tests/cuda_emulation/device_calls.h"

namespace polykv::test {

namespace {

void skip_without_device() __attribute__((constructor));
void skip_without_device() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return;
  std::printf("skipped: no device that CUDA can use: %s\n", cudaGetErrorString(error));
  std::fflush(stdout);
  std::_Exit(77);
}

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

class Memory {
 public:
  explicit Memory(uint64_t size_bytes) : size_bytes_(size_bytes) {
    require(cudaMalloc(&data_, size_bytes), "cudaMalloc");
    require(cudaMemset(data_, 0xff, size_bytes), "cudaMemset");
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }
  void upload(const void* host, uint64_t size_bytes) {
    require(cudaMemcpy(data_, host, size_bytes, cudaMemcpyHostToDevice), "copy to the device");
  }
  void download(void* host, uint64_t size_bytes) const {
    require(cudaMemcpy(host, data_, size_bytes, cudaMemcpyDeviceToHost), "copy from the device");
  }

 private:
  void* data_ = nullptr;
  uint64_t size_bytes_;
};

Status done(Status status) {
  require(cudaDeviceSynchronize(), "kernels");
  return status;
}

Status run_decode(const LayerView& layer, const DecodeTarget& target, const Schedule&) {
  return done(cuda::decode(layer, target, nullptr));
}

Status run_attend(const cuda::AttendCall& call, const cuda::Workspace& workspace,
                  uint32_t multiprocessor_count, const Schedule&) {
  return done(cuda::attend(call, workspace, multiprocessor_count, nullptr));
}

Status run_encode(const KvSource& source, const LayerSlot& slot, const cuda::Workspace& workspace,
                  cuda::EncodeOutcome* outcome, const Schedule&) {
  return done(cuda::encode(source, slot, workspace, outcome, nullptr));
}

Status run_checksum(std::span<const cuda::ChecksumRange> ranges, uint64_t* sums, const Schedule&) {
  return done(cuda::checksum(ranges, sums, nullptr));
}

}  // namespace

}  // namespace polykv::test

#include "tests/cuda_emulation/device_calls.inl"
