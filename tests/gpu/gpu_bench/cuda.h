// What gpu_bench wants of the CUDA runtime: errors that end it, device memory, times.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "common/result.h"

namespace polykv::bench {

/// Says what failed and ends the program with 1.
void check(cudaError_t error, const char* what);
void check(const Status& status);

/// Device memory.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, (count == 0 ? 1 : count) * sizeof(T)), "allocate device memory");
    data_ = static_cast<T*>(memory);
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    check(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }
  size_t count() const { return count_; }
  std::vector<T> host() const { return host(0, count_); }
  std::vector<T> host(size_t first, size_t count) const {
    std::vector<T> values(count);
    check(cudaMemcpy(values.data(), data_ + first, count * sizeof(T), cudaMemcpyDeviceToHost),
          "copy");
    return values;
  }
  /// All bits one: no number. Before a result is verified, so that none is left of an earlier call.
  void spoil() const { check(cudaMemset(data_, 0xff, count_ * sizeof(T)), "spoil"); }

 private:
  size_t count_;
  T* data_ = nullptr;
};

/// Milliseconds of work that is queued on the default stream: the median of some rounds.
double median_ms(uint32_t rounds, const std::function<void()>& work);

}  // namespace polykv::bench
