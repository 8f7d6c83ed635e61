#include "common/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

namespace polykv {

Result<UniqueFd> open_file(const std::string& path, const char* what) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY));
  const auto failed = [&](polykv_status code, const char* why, const char* remedy) {
    return Status(code, format("open the %s file '%s': %s; %s", what, path.c_str(), why, remedy));
  };
  if (!fd && (errno == ENOENT || errno == ENOTDIR)) {
    return failed(POLYKV_ERR_NOT_FOUND, "there is no such file", "check the path");
  }
  if (!fd && (errno == EACCES || errno == EPERM)) {
    return failed(POLYKV_ERR_PERMISSION, "you may not read it", "check its mode and owner");
  }
  if (!fd) return system_error(format("open the %s file '%s'", what, path.c_str()), errno);
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return system_error("look at '" + path + "'", errno);
  if (S_ISDIR(info.st_mode)) {
    return failed(POLYKV_ERR_INVALID_ARGUMENT, "it is a folder", "give a file");
  }
  return fd;
}

Result<std::string> read_file(const UniqueFd& fd, const std::string& path, const char* what,
                              uint64_t max_bytes) {
  std::string text;
  std::vector<char> buffer(size_t{1} << 20);
  for (;;) {
    const ssize_t got = ::read(fd.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_error(format("read the %s file '%s'", what, path.c_str()), errno);
    if (got == 0) return text;
    text.append(buffer.data(), static_cast<size_t>(got));
    if (text.size() > max_bytes) {
      return {POLYKV_ERR_LIMIT,
              format("read the %s file '%s': more than %llu MiB; give a smaller one", what,
                     path.c_str(), static_cast<unsigned long long>(max_bytes >> 20))};
    }
  }
}

Result<std::string> read_file(const std::string& path, const char* what, uint64_t max_bytes) {
  POLYKV_ASSIGN_OR_RETURN(const UniqueFd fd, open_file(path, what));
  return read_file(fd, path, what, max_bytes);
}

}  // namespace polykv
