#include "daemon/limits.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

namespace polykv::daemon {

MachineFacts machine_facts() {
  MachineFacts facts;
  facts.memory_total_bytes = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                             static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  facts.open_file_limit = files.rlim_cur;
  facts.cpu_count = std::max(1U, std::thread::hardware_concurrency());
  return facts;
}

Result<Limits> derive_limits(const Options& options, const MachineFacts& machine) {
  constexpr uint64_t kOwnDescriptors = 64;  // epoll, log, listening socket, worker, in transit
  constexpr uint64_t kLeastDescriptors = 256;
  if (machine.open_file_limit < kLeastDescriptors) {
    return {
        POLYKV_ERR_LIMIT,
        format("start: RLIMIT_NOFILE is %llu, polykvd needs at least %llu; raise it (ulimit -Hn, "
               "or LimitNOFILE= of the service)",
               static_cast<unsigned long long>(machine.open_file_limit),
               static_cast<unsigned long long>(kLeastDescriptors))};
  }
  // Half of the descriptors for connections (a socket, a pidfd, two in transit), half for segments
  // (one each, two while sealing).
  const uint64_t usable =
      std::min<uint64_t>(machine.open_file_limit, uint64_t{1} << 20) - kOwnDescriptors;
  Limits limits;
  limits.budget_bytes =
      options.budget_bytes != 0 ? options.budget_bytes : machine.memory_total_bytes / 2;
  limits.memory_reserve_bytes = options.memory_reserve_bytes;
  limits.session_count_max = usable / 2 / 4;
  limits.sessions_per_user_max = options.connections_per_user;
  limits.output_queue_packets = options.output_queue_packets;
  limits.output_queue_bytes =
      std::min<size_t>(options.output_queue_packets * 4096, 4 << 20) + (64 << 10);
  limits.segment_count_max = usable / 2 / 2;
  limits.document_tokens_max = options.document_tokens;
  // Token ids are a few bytes where a token's KV is kilobytes; what waits needs at least two lists.
  limits.token_list_bytes_max =
      std::max(limits.budget_bytes / 8, 2 * sizeof(uint32_t) * options.document_tokens);
  limits.list_page_documents = options.list_page_documents;
  limits.handshake_deadline_ms = options.handshake_deadline_ms;
  limits.stall_deadline_ms = options.stall_deadline_ms;
  limits.pool_thread_count = options.pool_threads != 0 ? static_cast<unsigned>(options.pool_threads)
                                                       : std::min(machine.cpu_count, 4U);
  return limits;
}

}  // namespace polykv::daemon
