#include "daemon/prefill/worker/free_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <string_view>

namespace polykv {

Result<FreeMemory> FreeMemory::open() {
  UniqueFd meminfo(::open("/proc/meminfo", O_RDONLY | O_CLOEXEC));
  if (!meminfo) return system_error("open /proc/meminfo", errno, "is /proc mounted?");
  return FreeMemory(std::move(meminfo));
}

Result<uint64_t> FreeMemory::available_bytes() const {
  std::array<char, 4096> buffer;
  const ssize_t size = ::pread(meminfo_.get(), buffer.data(), buffer.size(), 0);
  if (size < 0) return system_error("read /proc/meminfo", errno);
  const std::string_view text(buffer.data(), static_cast<size_t>(size));
  constexpr std::string_view kKey = "MemAvailable:";
  const size_t key = text.find(kKey);
  const size_t digits =
      key == text.npos ? text.npos : text.find_first_not_of(' ', key + kKey.size());
  uint64_t kib = 0;
  if (digits == text.npos ||
      std::from_chars(text.data() + digits, text.data() + text.size(), kib).ec != std::errc()) {
    return {POLYKV_ERR_SYSTEM, "read /proc/meminfo: it does not tell MemAvailable"};
  }
  return kib * 1024;
}

std::string mebibytes(uint64_t bytes) {
  return format("%llu MiB", static_cast<unsigned long long>((bytes + (1 << 20) - 1) >> 20));
}

}  // namespace polykv
