// Every capacity of the daemon, derived once at start-up from options and machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "daemon/options.h"

namespace polykv::daemon {

struct MachineFacts {
  uint64_t memory_total_bytes = 0;
  uint64_t open_file_limit = 0;  // RLIMIT_NOFILE, already raised
  unsigned cpu_count = 1;
};
MachineFacts machine_facts();

struct Limits {
  uint64_t budget_bytes = 0;          // stored and retiring segments
  uint64_t memory_reserve_bytes = 0;  // left free on the machine and in each control group

  size_t session_count_max = 0;
  size_t sessions_per_user_max = 0;
  size_t output_queue_packets = 0;  // of one session
  size_t output_queue_bytes = 0;
  size_t packets_per_event = 16;  // read from one session before the others get their turn

  size_t pending_requests_per_session = 64;  // waiting acquires and ingests
  size_t tickets_per_session = 16;
  size_t leases_per_session = 4096;
  size_t names_per_document = 16;
  size_t segment_count_max = 0;       // a descriptor each
  size_t segment_digests_max = 1792;  // 57,344 bytes: SegmentReserved must fit into a packet
  uint64_t document_tokens_max = 0;
  uint64_t token_list_bytes_max = 0;  // of all requests and documents, in the daemon's own memory
  size_t list_page_documents = 0;
  size_t list_page_bytes = 40 * 1024;  // a document's facts are at most 22 KiB
  size_t unacknowledged_packets_max = 4;
  size_t segments_per_packet = 16;

  int64_t handshake_deadline_ms = 0;
  int64_t stall_deadline_ms = 0;
  unsigned pool_thread_count = 0;
};

/// POLYKV_ERR_LIMIT when RLIMIT_NOFILE is too low to be of use; names the limit.
Result<Limits> derive_limits(const Options& options, const MachineFacts& machine);

}  // namespace polykv::daemon
