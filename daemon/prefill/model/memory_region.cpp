#include "daemon/prefill/model/memory_region.h"

#include <sys/mman.h>

#include <cerrno>
#include <cinttypes>
#include <cstring>

namespace polykv {

Result<std::shared_ptr<void>> allocate_region(uint64_t size_bytes, const char* what) {
  static constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
  static constexpr uint64_t kMostBytes = uint64_t{1} << 46;
  const auto no_memory = [&](const char* cause) {
    return Status(POLYKV_ERR_NO_MEMORY,
                  format("allocate %" PRIu64 " bytes for %s: %s; free memory or use a "
                         "smaller model or document",
                         size_bytes, what, cause));
  };
  if (size_bytes == 0 || size_bytes > kMostBytes) return no_memory("no such size can be mapped");
  const uint64_t rounded = (size_bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uint64_t mapped = rounded + kHugePageBytes;  // room to align
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return no_memory(errno == ENOMEM ? "out of memory" : "mmap failed");
  const auto address = reinterpret_cast<uintptr_t>(base);
  void* aligned =
      static_cast<char*>(base) + (kHugePageBytes - address % kHugePageBytes) % kHugePageBytes;
  madvise(aligned, rounded, MADV_HUGEPAGE);  // advice: failing is harmless
  return std::shared_ptr<void>(aligned, [base, mapped](void*) { munmap(base, mapped); });
}

}  // namespace polykv
