#include "tests/gpu/gpu_bench/cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace polykv::bench {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "gpu_bench: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void check(const Status& status) {
  if (status.is_ok()) return;
  std::fprintf(stderr, "gpu_bench: %s\n", status.message().c_str());
  std::exit(1);
}

double median_ms(uint32_t rounds, const std::function<void()>& work) {
  cudaEvent_t begin;
  cudaEvent_t end;
  check(cudaEventCreate(&begin), "make an event");
  check(cudaEventCreate(&end), "make an event");
  for (uint32_t i = 0; i < std::min(rounds, 2U); ++i) work();
  check(cudaDeviceSynchronize(), "warm up");
  std::vector<float> times(rounds);
  for (float& time : times) {
    check(cudaEventRecord(begin), "record an event");
    work();
    check(cudaEventRecord(end), "record an event");
    check(cudaEventSynchronize(end), "run");
    check(cudaEventElapsedTime(&time, begin, end), "read an event");
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return static_cast<double>(times[rounds / 2]);
}

}  // namespace polykv::bench
