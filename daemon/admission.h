// Whether a segment may be allocated, and what to evict for it. Pure functions of plain structs:
// asked before memory is touched, because an allocation under a control group's limit ends in the
// OOM killer, not in an error.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/result.h"
#include "daemon/memory_probe.h"

namespace polykv::daemon {

/// A sealed document that eviction may consider.
struct EvictionCandidate {
  uint64_t document = 0;        // whatever the caller finds it by
  uint64_t last_use = 0;        // larger is later
  uint64_t freeable_bytes = 0;  // of segments that no process holds
  bool is_leased = false;
  uint64_t freeable_segments = 0;
};

/// The least recently used unleased documents that together free at least needed_bytes and
/// needed_segments; those that would free nothing are left alone. Empty when that cannot be
/// reached, or nothing is needed.
std::vector<uint64_t> choose_evictions(std::span<const EvictionCandidate> candidates,
                                       uint64_t needed_bytes, uint64_t needed_segments = 0);

/// One more segment.
struct AdmissionRequest {
  uint64_t needed_bytes = 0;
  uint64_t segment_count = 0;      // stored and retiring
  uint64_t segment_count_max = 0;  // a descriptor each
  uint64_t budget_bytes = 0;
  uint64_t charged_bytes = 0;      // stored and retiring
  uint64_t retiring_bytes = 0;     // part of charged_bytes that only other processes can free
  uint64_t unallocated_bytes = 0;  // charged, but not yet taken from the machine
  uint64_t reserve_bytes = 0;      // to be left free on the machine and in each control group
  std::span<const MemoryHeadroom> headrooms;
  std::span<const EvictionCandidate> candidates;
};

struct Admission {
  std::vector<uint64_t> evict;  // these documents first
};

/// POLYKV_ERR_BUDGET names what is needed, what is free of whichever is short, and the remedy;
/// POLYKV_ERR_LIMIT when there are too many segments.
Result<Admission> admit(const AdmissionRequest& request);

}  // namespace polykv::daemon
