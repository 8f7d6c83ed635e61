#include "daemon/prefill/worker/warm_up.h"

#include <unistd.h>

#include <thread>

#include "daemon/prefill/transformer/blas.h"
#include "daemon/prefill/transformer/transformer.h"

namespace polykv {

void warm_up(uint32_t thread_count) {
  set_thread_count(thread_count);
  warm_up_blas();
  std::thread([] {}).join();
  static_cast<void>(::sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace polykv
