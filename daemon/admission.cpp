#include "daemon/admission.h"

#include <algorithm>

namespace polykv::daemon {

namespace {

uint64_t minus(uint64_t value, uint64_t less) {
  return value - std::min(value, less);
}

uint64_t budget_free(const AdmissionRequest& request) {
  return minus(request.budget_bytes, request.charged_bytes);
}

uint64_t free_of(const MemoryHeadroom& headroom, const AdmissionRequest& request) {
  return minus(headroom.free_bytes, request.unallocated_bytes + request.reserve_bytes);
}

Status short_of(const AdmissionRequest& request, const std::string& what, uint64_t free_bytes,
                const std::string& remedy) {
  return {POLYKV_ERR_BUDGET,
          format("reserve memory: %llu bytes needed, %llu free of %s; %s",
                 static_cast<unsigned long long>(request.needed_bytes),
                 static_cast<unsigned long long>(free_bytes), what.c_str(), remedy.c_str())};
}

}  // namespace

Room shortage(const AdmissionRequest& request) {
  uint64_t bytes = minus(request.needed_bytes, budget_free(request));
  for (const MemoryHeadroom& headroom : request.headrooms)
    bytes = std::max(bytes, minus(request.needed_bytes, free_of(headroom, request)));
  return {bytes, minus(request.segment_count + 1, request.segment_count_max)};
}

Status refusal(const AdmissionRequest& request, const Room& freeable) {
  if (minus(request.segment_count + 1, request.segment_count_max) > freeable.segments) {
    return {POLYKV_ERR_LIMIT,
            format("reserve a segment: polykvd has its maximum of %llu segments, and all are in "
                   "use; end leases and remove documents (polykvctl rm), or raise its "
                   "RLIMIT_NOFILE (LimitNOFILE= of the service)",
                   static_cast<unsigned long long>(request.segment_count_max))};
  }
  for (const MemoryHeadroom& headroom : request.headrooms) {
    const uint64_t free_bytes = free_of(headroom, request);
    if (minus(request.needed_bytes, free_bytes) > freeable.bytes)
      return short_of(request, headroom.name, free_bytes, headroom.remedy);
  }
  std::string what =
      format("the budget of %llu bytes", static_cast<unsigned long long>(request.budget_bytes));
  if (freeable.bytes > 0) {
    what += format(" (and %llu in documents that could be evicted)",
                   static_cast<unsigned long long>(freeable.bytes));
  }
  if (request.retiring_bytes > 0) {
    what += format(" (%llu are of removed documents that processes still hold)",
                   static_cast<unsigned long long>(request.retiring_bytes));
  }
  return short_of(request, what, budget_free(request),
                  "raise polykvd's --budget, or end leases and remove documents (polykvctl rm)");
}

}  // namespace polykv::daemon
