// polykv-prefill: started by polykvd with its socket as descriptor 3, never by a person.
//
// Exit codes: 0 when polykvd closed the connection, or --self-check found nothing wrong; else the
// number of the status that ended it (docs/exit-codes.md): 2 for a start by hand, 17 or 18 when the
// sandbox cannot be had, 21 or 22 for a model that is no good.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <thread>

#include "common/fd.h"
#include "daemon/prefill/transformer/transformer.h"
#include "daemon/prefill/worker/free_memory.h"
#include "daemon/prefill/worker/gpu_start.h"
#include "daemon/prefill/worker/sandbox.h"
#include "daemon/prefill/worker/warm_up.h"
#include "daemon/prefill/worker/worker.h"
#include "polykv/version.h"

namespace polykv {

namespace {

constexpr int kDaemonSocket = 3;

int report(const Status& status) {
  if (!status.is_ok()) std::fprintf(stderr, "polykv-prefill: %s\n", status.message().c_str());
  return static_cast<int>(status.code());
}

/// Goes through what a worker does before it reads a model, and says in JSON what it found.
int self_check() {
  const uint32_t thread_count = std::max(1U, std::thread::hardware_concurrency());
  const Result<FreeMemory> free_memory = FreeMemory::open();
  warm_up(thread_count);
  const BlasInfo blas = blas_info();
  // What would be computed with, by itself: `automatic` always finds something.
  ComputerSettings settings;
  settings.thread_count = thread_count;
  settings.host_description = "the processor";
  const Result<ChosenComputer> chosen = choose_computer(settings);
  if (!chosen.is_ok()) return report(chosen.status());
  Status sandbox = enter_sandbox({.uses_gpu = chosen->gpu.has_value()});
  if (sandbox.is_ok() && (::open("/proc/self/exe", O_RDONLY | O_CLOEXEC) >= 0 || errno != EPERM)) {
    sandbox = {POLYKV_ERR_UNSUPPORTED, "check the sandbox: it lets a file be opened"};
  }
  if (sandbox.is_ok() && chosen->gpu) {
    sandbox = use_gpu_once(*chosen->gpu).with_context("check the sandbox: the GPU fails in it");
  }
  nlohmann::json facts = {{"blas", blas.description},
                          {"blas_is_good", blas.is_good},
                          {"blas_remedy", blas.remedy},
                          {"thread_count", thread_count},
                          {"sandbox_is_good", sandbox.is_ok()},
                          {"sandbox_remedy", sandbox.message()},
                          {"computes_on", chosen->computer->description()},
                          {"uses_gpu", chosen->gpu.has_value()}};
  if (free_memory.is_ok()) {
    const Result<uint64_t> available = free_memory->available_bytes();
    if (available.is_ok()) facts["memory_available_bytes"] = *available;
  }
  std::cout << facts.dump(2) << std::endl;
  return static_cast<int>(sandbox.code());
}

int serve() {
  int type = 0;
  socklen_t size = sizeof type;
  if (::getsockopt(kDaemonSocket, SOL_SOCKET, SO_TYPE, &type, &size) != 0 ||
      type != SOCK_SEQPACKET) {
    return report({POLYKV_ERR_INVALID_ARGUMENT,
                   "there is no socket of polykvd's: polykvd starts this program by itself; use "
                   "polykvctl put"});
  }
  UniqueFd socket(kDaemonSocket);
  ::fcntl(socket.get(), F_SETFD, FD_CLOEXEC);
  return report(run_worker(std::move(socket)));
}

}  // namespace

int prefill_main(int argument_count, char** arguments) {
  const Status hardened = harden_process();
  if (!hardened.is_ok()) return report(hardened);
  const std::string_view argument = argument_count > 1 ? arguments[1] : "";
  if (argument_count == 1) return serve();
  if (argument == "--self-check") return self_check();
  if (argument == "--version") return std::puts("polykv-prefill " POLYKV_VERSION_TEXT), 0;
  std::puts(
      "polykv-prefill is started by polykvd.\n"
      "  --self-check   print as JSON which BLAS it uses and whether its sandbox holds\n"
      "  --version      print the version");
  return argument == "--help" ? 0 : static_cast<int>(POLYKV_ERR_INVALID_ARGUMENT);
}

}  // namespace polykv

int main(int argument_count, char** arguments) try {
  polykv::wait_passively(arguments);
  return polykv::prefill_main(argument_count, arguments);
} catch (const std::exception& error) {
  std::fprintf(stderr, "polykv-prefill: %s\n", error.what());
  return POLYKV_ERR_INTERNAL;
}
