#include "libclient/process.h"

#include <pthread.h>

#include <atomic>

namespace polykv::lib {

namespace {
// Relaxed: the value only changes in a new process, before any other thread of it exists.
std::atomic<uint64_t> generation{1};

extern "C" void polykv_count_fork() {
  generation.fetch_add(1, std::memory_order_relaxed);
}
}  // namespace

uint64_t process_generation() {
  // The handler goes with the library when it is unloaded: glibc ties it to the shared object.
  static const int registered = ::pthread_atfork(nullptr, nullptr, polykv_count_fork);
  assert(registered == 0 && "pthread_atfork needs a few bytes");
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

Status check_same_process(uint64_t made_in, const char* operation) {
  if (process_generation() == made_in) return Status::ok();
  return {POLYKV_ERR_FORKED, std::string(operation) +
                                 ": the handle was made before fork() and belongs to the parent; "
                                 "connect anew in the child"};
}

}  // namespace polykv::lib
