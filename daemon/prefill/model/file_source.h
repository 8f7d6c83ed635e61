// An untrusted file, read with pread only. Never mapped: a file that somebody truncates while we
// read gives an error here and would give SIGBUS through a mapping.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "common/result.h"

namespace polykv {

/// Borrows the descriptor: whoever opened it keeps it open for as long as the FileSource is used.
/// Copies are cheap. Thread-safe: pread has no shared position.
class FileSource {
 public:
  /// `name` is for error messages (a path, or what the client called the file). The descriptor must
  /// be a regular file or a memfd, open for reading.
  static Result<FileSource> open(int fd, std::string name);

  const std::string& name() const { return name_; }
  uint64_t size_bytes() const { return size_bytes_; }  // as it was at open()

  /// Fills `target` from `offset`. POLYKV_ERR_MODEL_FORMAT when the file ends before;
  /// POLYKV_ERR_SYSTEM when the system call fails.
  Status read(uint64_t offset, std::span<uint8_t> target) const;

 private:
  FileSource(int fd, std::string name, uint64_t size_bytes)
      : fd_(fd), name_(std::move(name)), size_bytes_(size_bytes) {}

  int fd_;
  std::string name_;
  uint64_t size_bytes_;
};

/// Text of unknown origin for an error message: quoted, control bytes and non-ASCII escaped, cut
/// after 64 bytes.
std::string quoted(std::string_view text);

}  // namespace polykv
