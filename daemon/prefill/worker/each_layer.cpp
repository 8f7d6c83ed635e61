#include "daemon/prefill/worker/each_layer.h"

#include <atomic>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace polykv {

Status for_each_layer(uint32_t layer_count, uint32_t thread_count,
                      const std::function<Status(uint32_t layer, uint32_t thread)>& action) {
  std::atomic<uint32_t> next_layer{0};  // relaxed: only hands out numbers; join() orders the rest
  std::mutex mutex;
  Status failure;  // the first one; guarded by mutex
  const auto run = [&](uint32_t layer, uint32_t thread) -> Status {
    try {
      return action(layer, thread);
    } catch (const std::bad_alloc&) {
      return {POLYKV_ERR_NO_MEMORY, "ingest: out of memory; raise worker.memory_limit"};
    }
  };
  const auto work = [&](uint32_t thread) {
    while (true) {
      const uint32_t layer = next_layer.fetch_add(1, std::memory_order_relaxed);
      if (layer >= layer_count) return;
      Status status = run(layer, thread);
      if (!status.is_ok()) {
        const std::lock_guard lock(mutex);
        if (failure.is_ok()) failure = std::move(status);
      }
    }
  };
  std::vector<std::thread> threads;
  try {
    for (uint32_t i = 1; i < thread_count; ++i) threads.emplace_back(work, i);
  } catch (const std::system_error&) {
    // No more threads to be had: those that are there do the work.
  }
  work(0);
  for (std::thread& thread : threads) thread.join();
  return failure;
}

}  // namespace polykv
