#include "daemon/prefill/worker/text_input.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace polykv {

namespace {

constexpr size_t kReadBytes = size_t{256} << 10;
constexpr int64_t kAliveIntervalMs = 1000;

using Clock = std::chrono::steady_clock;

class TextReader {
 public:
  TextReader(int fd, const std::string& what, const TextLimits& limits,
             const std::function<bool()>& alive)
      : fd_(fd),
        what_(what),
        limits_(limits),
        alive_(alive),
        deadline_(Clock::now() + std::chrono::milliseconds(limits.deadline_ms)) {}

  Result<std::string> read_all() {
    struct stat info {};
    if (::fstat(fd_, &info) != 0) return system_error("read " + what_, errno);
    if (!S_ISREG(info.st_mode) && !S_ISFIFO(info.st_mode) && !S_ISSOCK(info.st_mode)) {
      return {POLYKV_ERR_INVALID_ARGUMENT,
              "read " + what_ + ": it is neither a file nor a pipe; pass one of these"};
    }
    from_start_ = S_ISREG(info.st_mode);
    while (true) {
      if (alive_ && !alive_()) return {POLYKV_ERR_CANCELLED, "read " + what_ + ": cancelled"};
      POLYKV_ASSIGN_OR_RETURN(const bool ready, wait_readable());
      if (!ready) continue;
      POLYKV_ASSIGN_OR_RETURN(const size_t got, read_some());
      if (got == 0) return std::move(text_);
      if (text_.size() > limits_.max_bytes) {
        return {POLYKV_ERR_LIMIT,
                format("read %s: it has more than %llu bytes; cut it", what_.c_str(),
                       static_cast<unsigned long long>(limits_.max_bytes))};
      }
    }
  }

 private:
  /// True: a read will not wait. False: not yet, call alive_ again.
  Result<bool> wait_readable() {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
    if (left <= 0) {
      return {POLYKV_ERR_TIMEOUT,
              format("read %s: its end did not come within %lld ms; put it in a file first",
                     what_.c_str(), static_cast<long long>(limits_.deadline_ms))};
    }
    if (from_start_) return true;
    pollfd entry{fd_, POLLIN, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::min(left, kAliveIntervalMs)));
    if (ready < 0 && errno != EINTR) return system_error("read " + what_, errno);
    return ready > 0;
  }

  Result<size_t> read_some() {
    const size_t done = text_.size();
    text_.resize(done + kReadBytes);
    ssize_t got = -1;
    do {
      got = from_start_ ? ::pread(fd_, text_.data() + done, kReadBytes, static_cast<off_t>(done))
                        : ::read(fd_, text_.data() + done, kReadBytes);
    } while (got < 0 && errno == EINTR);
    text_.resize(done + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0) return system_error("read " + what_, errno, "is it open for reading?");
    return static_cast<size_t>(got);
  }

  int fd_;
  const std::string& what_;
  const TextLimits& limits_;
  const std::function<bool()>& alive_;
  Clock::time_point deadline_;
  bool from_start_ = false;
  std::string text_;
};

}  // namespace

Result<std::string> read_text(int fd, const std::string& what, const TextLimits& limits,
                              const std::function<bool()>& alive) {
  return TextReader(fd, what, limits, alive).read_all();
}

}  // namespace polykv
