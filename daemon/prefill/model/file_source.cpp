#include "daemon/prefill/model/file_source.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>

namespace polykv {

Result<FileSource> FileSource::open(int fd, std::string name) {
  struct stat info {};
  if (fstat(fd, &info) != 0) {
    return system_error("open model " + quoted(name), errno, "give the path of a GGUF file");
  }
  if (!S_ISREG(info.st_mode)) {
    return {POLYKV_ERR_MODEL_FORMAT,
            "open model " + quoted(name) + ": not a regular file; give the path of a GGUF file"};
  }
  return FileSource(fd, std::move(name), static_cast<uint64_t>(info.st_size));
}

Status FileSource::read(uint64_t offset, std::span<uint8_t> target) const {
  const auto ends_early = [&] {
    return Status(
        POLYKV_ERR_MODEL_FORMAT,
        format("read model %s: %zu bytes at offset %" PRIu64
               " are beyond the file's end at %" PRIu64 "; the file is truncated, fetch it again",
               quoted(name_).c_str(), target.size(), offset, size_bytes_));
  };
  if (offset > size_bytes_ || target.size() > size_bytes_ - offset) return ends_early();
  size_t done = 0;
  while (done < target.size()) {
    // One call reads at most 2 GiB on Linux; smaller pieces keep a signal's delay short.
    const size_t piece = std::min<size_t>(target.size() - done, size_t{64} << 20);
    const ssize_t count =
        pread(fd_, target.data() + done, piece, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return system_error("read model " + quoted(name_), errno);
    if (count == 0) return ends_early();  // truncated after open()
    done += static_cast<size_t>(count);
  }
  return Status::ok();
}

std::string quoted(std::string_view text) {
  static constexpr size_t kShown = 64;
  std::string result = "'";
  for (const char character : text.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(character);
    if (byte < 0x20 || byte > 0x7e) {
      result += format("\\x%02x", byte);
    } else {
      result += character;
    }
  }
  return result + (text.size() > kShown ? "...'" : "'");
}

}  // namespace polykv
