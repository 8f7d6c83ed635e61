#include "libclient/cli/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "common/memfd.h"

namespace polykv::cli {

namespace {

constexpr size_t kCopyBytes = 1 << 20;

Status copy_all(int from, int to, const char* what) {
  std::vector<uint8_t> buffer(kCopyBytes);
  for (uint64_t total = 0;;) {
    const ssize_t got = ::read(from, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_error(format("read the %s from standard input", what), errno);
    if (got == 0) return Status::ok();
    total += static_cast<uint64_t>(got);
    if (total > kMaxTextBytes) {
      return {POLYKV_ERR_LIMIT, format("read the %s from standard input: more than %llu MiB; "
                                       "split it",
                                       what, static_cast<unsigned long long>(kMaxTextBytes >> 20))};
    }
    for (ssize_t done = 0; done < got;) {
      const ssize_t written = ::write(to, buffer.data() + done, static_cast<size_t>(got - done));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return system_error(format("keep the %s", what), errno, "is memory short?");
      done += written;
    }
  }
}

/// Sealed, so that the daemon may read what nobody can change any more.
Result<UniqueFd> standard_input(const char* what) {
  POLYKV_ASSIGN_OR_RETURN(UniqueFd fd, memfd_create_sealable("polykv-text"));
  POLYKV_RETURN_IF_ERROR(copy_all(STDIN_FILENO, fd.get(), what));
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) !=
      0) {
    return system_error(format("seal the %s", what), errno);
  }
  return fd;
}

}  // namespace

Result<UniqueFd> open_input(const std::string& path, const char* what) {
  if (path == "-") return standard_input(what);
  return open_file(path, what);
}

Result<std::string> read_input(const std::string& path, const char* what, uint64_t max_bytes) {
  POLYKV_ASSIGN_OR_RETURN(const UniqueFd fd, open_input(path, what));
  if (path == "-" && ::lseek(fd.get(), 0, SEEK_SET) != 0) return system_error("rewind", errno);
  return read_file(fd, path, what, max_bytes);
}

Result<UniqueFd> open_model_file(const std::string& path) {
  struct stat info;
  // A FIFO would block the open; a device is no model either.
  if (path != "-" && ::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) &&
      !S_ISDIR(info.st_mode)) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "open the model file '" + path + "': it is no regular file; give a GGUF file"};
  }
  return open_input(path, "model");
}

Result<ModelArgument> open_model(const std::string& model) {
  struct stat info;
  const bool is_path = model.find('/') != std::string::npos || model.ends_with(".gguf") ||
                       ::stat(model.c_str(), &info) == 0;
  ModelArgument argument;
  if (!is_path) {
    argument.name = model;
    return argument;
  }
  Result<UniqueFd> file = open_model_file(model);
  if (file.status().code() == POLYKV_ERR_NOT_FOUND) {
    return {POLYKV_ERR_NOT_FOUND,
            format("open the model file '%s': there is no such file; give the path of a GGUF file, "
                   "or a name of polykvd's [models]",
                   model.c_str())};
  }
  if (!file.is_ok()) return file.status();
  argument.file = std::move(file).value();
  return argument;
}

std::optional<uint64_t> size_of(const UniqueFd& fd) {
  struct stat info;
  if (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
  return static_cast<uint64_t>(info.st_size);
}

}  // namespace polykv::cli
