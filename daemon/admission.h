// Whether a segment may be allocated, and how much room has to be made for it. Pure functions of
// plain structs: asked before memory is touched, because an allocation under a control group's limit
// ends in the OOM killer, not in an error.
#pragma once

#include <cstdint>
#include <span>

#include "common/result.h"
#include "daemon/memory_probe.h"

namespace polykv::daemon {

/// What segments take.
struct Room {
  uint64_t bytes = 0;
  uint64_t segments = 0;  // a descriptor each

  bool is_none() const { return bytes == 0 && segments == 0; }
  bool covers(const Room& needed) const {
    return bytes >= needed.bytes && segments >= needed.segments;
  }
};

/// One more segment.
struct AdmissionRequest {
  uint64_t needed_bytes = 0;
  uint64_t segment_count = 0;  // stored and retiring
  uint64_t segment_count_max = 0;
  uint64_t budget_bytes = 0;
  uint64_t charged_bytes = 0;      // stored and retiring
  uint64_t retiring_bytes = 0;     // part of charged_bytes that only other processes can free
  uint64_t unallocated_bytes = 0;  // charged, but not yet taken from the machine
  uint64_t reserve_bytes = 0;      // to be left free on the machine and in each control group
  std::span<const MemoryHeadroom> headrooms;
};

/// What has to be freed first; none: it fits.
Room shortage(const AdmissionRequest& request);

/// Why it does not fit although `freeable` could be freed. POLYKV_ERR_BUDGET names what is needed,
/// what is free of whichever is short, and the remedy; POLYKV_ERR_LIMIT: there are too many segments.
Status refusal(const AdmissionRequest& request, const Room& freeable);

}  // namespace polykv::daemon
