#include "daemon/admission.h"

#include <algorithm>

namespace polykv::daemon {

namespace {

uint64_t minus(uint64_t value, uint64_t less) {
  return value - std::min(value, less);
}

Status refuse(const AdmissionRequest& request, const std::string& what, uint64_t free_bytes,
              const std::string& remedy) {
  return {POLYKV_ERR_BUDGET,
          format("reserve memory: %llu bytes needed, %llu free of %s; %s",
                 static_cast<unsigned long long>(request.needed_bytes),
                 static_cast<unsigned long long>(free_bytes), what.c_str(), remedy.c_str())};
}

}  // namespace

std::vector<uint64_t> choose_evictions(std::span<const EvictionCandidate> candidates,
                                       uint64_t needed_bytes, uint64_t needed_segments) {
  if (needed_bytes == 0 && needed_segments == 0) return {};
  std::vector<EvictionCandidate> usable;
  for (const EvictionCandidate& candidate : candidates) {
    if (!candidate.is_leased && candidate.freeable_segments > 0) usable.push_back(candidate);
  }
  std::sort(usable.begin(), usable.end(),
            [](const auto& a, const auto& b) { return a.last_use < b.last_use; });
  std::vector<uint64_t> chosen;
  uint64_t freed_bytes = 0;
  uint64_t freed_segments = 0;
  for (const EvictionCandidate& candidate : usable) {
    chosen.push_back(candidate.document);
    freed_bytes += candidate.freeable_bytes;
    freed_segments += candidate.freeable_segments;
    if (freed_bytes >= needed_bytes && freed_segments >= needed_segments) return chosen;
  }
  return {};
}

Result<Admission> admit(const AdmissionRequest& request) {
  uint64_t evictable_bytes = 0;
  uint64_t evictable_segments = 0;
  for (const EvictionCandidate& candidate : request.candidates) {
    if (candidate.is_leased) continue;
    evictable_bytes += candidate.freeable_bytes;
    evictable_segments += candidate.freeable_segments;
  }
  const uint64_t short_segments = minus(request.segment_count + 1, request.segment_count_max);
  if (short_segments > evictable_segments) {
    return Status(
        POLYKV_ERR_LIMIT,
        format("reserve a segment: polykvd has its maximum of %llu segments, and all are in use; "
               "end leases and remove documents (polykvctl rm), or raise its RLIMIT_NOFILE "
               "(LimitNOFILE= of the service)",
               static_cast<unsigned long long>(request.segment_count_max)));
  }
  const uint64_t budget_free = minus(request.budget_bytes, request.charged_bytes);
  uint64_t short_bytes = minus(request.needed_bytes, budget_free);
  if (short_bytes > evictable_bytes) {
    std::string what =
        format("the budget of %llu bytes", static_cast<unsigned long long>(request.budget_bytes));
    if (evictable_bytes > 0) {
      what += format(" (and %llu in documents that could be evicted)",
                     static_cast<unsigned long long>(evictable_bytes));
    }
    if (request.retiring_bytes > 0) {
      what += format(" (%llu are of removed documents that processes still hold)",
                     static_cast<unsigned long long>(request.retiring_bytes));
    }
    return refuse(request, what, budget_free,
                  "raise polykvd's --budget, or end leases and remove documents (polykvctl rm)");
  }
  for (const MemoryHeadroom& headroom : request.headrooms) {
    const uint64_t free_bytes =
        minus(headroom.free_bytes, request.unallocated_bytes + request.reserve_bytes);
    const uint64_t shortage = minus(request.needed_bytes, free_bytes);
    if (shortage > evictable_bytes) {
      return refuse(request, headroom.name, free_bytes, headroom.remedy);
    }
    short_bytes = std::max(short_bytes, shortage);
  }
  return Admission{choose_evictions(request.candidates, short_bytes, short_segments)};
}

}  // namespace polykv::daemon
