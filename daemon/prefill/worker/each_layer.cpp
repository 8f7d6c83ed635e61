#include "daemon/prefill/worker/encode_segment.h"

#include <atomic>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace polykv {

namespace {

KvSource layer_source(const KvCache& cache, uint32_t layer, uint64_t first_token) {
  const Strides strides{static_cast<int64_t>(cache.head_stride()),
                        static_cast<int64_t>(cache.token_stride()), 1};
  const size_t first_float = first_token * cache.token_stride();
  return {Dtype::f32, cache.k(layer) + first_float, strides, cache.v(layer) + first_float, strides};
}

/// The first error of any layer.
Status for_each_layer(uint32_t layer_count, uint32_t thread_count,
                      const std::function<Status(uint32_t layer)>& action) {
  std::atomic<uint32_t> next_layer{0};  // relaxed: only hands out numbers; join() orders the rest
  std::mutex mutex;
  Status failure;  // the first one; guarded by mutex
  const auto work = [&] {
    while (true) {
      const uint32_t layer = next_layer.fetch_add(1, std::memory_order_relaxed);
      if (layer >= layer_count) return;
      Status status = action(layer);
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

}  // namespace

Status examine_segment(lib::Publisher& publisher, const KvCache& cache, const LastQueries& queries,
                       uint64_t token_count, uint32_t thread_count) {
  const uint64_t first_token = publisher.next_token();
  return for_each_layer(cache.layer_count(), thread_count, [&](uint32_t layer) {
    return publisher.examine_layer(token_count, layer, layer_source(cache, layer, first_token),
                                   queries.of(layer, first_token));
  });
}

Status encode_segment(lib::OpenSegment& segment, const KvCache& cache, uint32_t thread_count) {
  return for_each_layer(cache.layer_count(), thread_count, [&](uint32_t layer) {
    return segment.encode_layer(layer, layer_source(cache, layer, segment.first_token()));
  });
}

}  // namespace polykv
