#include "common/memfd.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

// Kernel 6.3; Debian 12's headers do not have it.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace polykv {

namespace {
Status write_all(int fd, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0)
      return system_error("write to a memfd", written < 0 ? errno : EIO, "is memory short?");
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return Status::ok();
}
}  // namespace

Result<UniqueFd> memfd_create_sealable(const char* label) {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = ::memfd_create(label, kFlags | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create(label, kFlags);
  if (fd < 0) return system_error("create a memfd", errno, "see RLIMIT_NOFILE");
  return UniqueFd(fd);
}

Result<UniqueFd> memfd_from_tokens(std::span<const uint32_t> ids) {
  assert(!ids.empty());
  POLYKV_ASSIGN_OR_RETURN(UniqueFd fd, memfd_create_sealable("polykv-tokens"));
  POLYKV_RETURN_IF_ERROR(
      write_all(fd.get(), {reinterpret_cast<const uint8_t*>(ids.data()), ids.size_bytes()}));
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) !=
      0) {
    return system_error("seal a token list", errno);
  }
  return fd;
}

Result<std::vector<uint32_t>> memfd_read_tokens(int fd, uint64_t token_count,
                                                uint64_t max_token_count) {
  if (token_count == 0 || token_count > max_token_count) {
    return {POLYKV_ERR_LIMIT, format("read a token list: %llu tokens; 1 to %llu are allowed",
                                     static_cast<unsigned long long>(token_count),
                                     static_cast<unsigned long long>(max_token_count))};
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_WRITE | F_SEAL_SHRINK;
  if (seals < 0 || (seals & kNeeded) != kNeeded) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "read a token list: its descriptor is no memfd sealed against writing and shrinking; "
            "seal it before sending"};
  }
  struct stat info;
  if (::fstat(fd, &info) != 0) return system_error("read a token list", errno);
  if (static_cast<uint64_t>(info.st_size) != token_count * sizeof(uint32_t)) {
    return {POLYKV_ERR_INVALID_ARGUMENT, format("read a token list: %llu tokens announced, but the "
                                                "descriptor holds %lld bytes (4 a token)",
                                                static_cast<unsigned long long>(token_count),
                                                static_cast<long long>(info.st_size))};
  }
  std::vector<uint32_t> ids(token_count);
  uint64_t done = 0;
  while (done < ids.size() * sizeof(uint32_t)) {
    const ssize_t got = ::pread(fd, reinterpret_cast<uint8_t*>(ids.data()) + done,
                                ids.size() * sizeof(uint32_t) - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return system_error("read a token list", got < 0 ? errno : EIO);
    done += static_cast<uint64_t>(got);
  }
  return ids;
}

}  // namespace polykv
