#include "daemon/prefill/worker/warm_up.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <unistd.h>

#include <exception>
#include <thread>

#include "daemon/prefill/transformer/transformer.h"

namespace polykv {

void warm_up(uint32_t thread_count) {
  set_thread_count(thread_count);
  const at::NoGradGuard no_grad;
  // Large enough that every thread gets work.
  const at::Tensor matrix = at::full({512, 512}, 0.5F);
  const at::Tensor product = at::softmax(at::matmul(matrix, matrix), -1);
  at::parallel_for(0, 1 << 20, 1, [](int64_t, int64_t) {});
  // The unwinder finds its tables with the first exception.
  try {
    static_cast<void>(product.view({3, 5}));
  } catch (const std::exception&) {
  }
  std::thread([] {}).join();
  static_cast<void>(::sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace polykv
