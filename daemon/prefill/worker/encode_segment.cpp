#include "daemon/prefill/worker/encode_segment.h"

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace polykv {

Status encode_segment(lib::OpenSegment& segment, const KvCache& cache, uint32_t thread_count) {
  const Strides strides{static_cast<int64_t>(cache.head_stride()),
                        static_cast<int64_t>(cache.token_stride()), 1};
  const size_t first_float = segment.first_token() * cache.token_stride();
  std::atomic<uint32_t> next_layer{0};  // relaxed: only hands out numbers; join() orders the rest
  std::mutex mutex;
  Status failure;  // the first one; guarded by mutex
  const auto work = [&] {
    while (true) {
      const uint32_t layer = next_layer.fetch_add(1, std::memory_order_relaxed);
      if (layer >= cache.layer_count()) return;
      const KvSource source{Dtype::f32, cache.k(layer) + first_float, strides,
                            cache.v(layer) + first_float, strides};
      Status status = segment.encode_layer(layer, source);
      if (!status.is_ok()) {
        const std::lock_guard lock(mutex);
        if (failure.is_ok()) failure = std::move(status);
      }
    }
  };
  std::vector<std::thread> threads;
  try {
    for (uint32_t i = 1; i < thread_count; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads to be had: those that are there do the work.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return failure;
}

}  // namespace polykv
