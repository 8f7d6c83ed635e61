// Starts the real polykvd on a private folder and ends it, by its own PID, with the test. Throws
// std::runtime_error with the daemon's log. POLYKV_DAEMON_PATH comes from the target
// polykv_test_daemon.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/fd.h"
#include "tests/support/emulated_device.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/user.h"

namespace polykv::test {

/// What a child process of a test ended with.
struct ExitStatus {
  bool was_killed = false;
  int code = 0;  // exit code, or signal
};

inline ExitStatus wait_for_exit(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) throw std::runtime_error("waitpid failed");
  }
  return WIFSIGNALED(status) ? ExitStatus{true, WTERMSIG(status)}
                             : ExitStatus{false, WEXITSTATUS(status)};
}

/// A program that was taken to another machine finds the daemon elsewhere than where it was built.
inline std::string daemon_path() {
  const char* elsewhere = std::getenv("POLYKV_TEST_DAEMON");
  return elsewhere == nullptr ? POLYKV_DAEMON_PATH : elsewhere;
}

class DaemonProcess {
 public:
  /// Flags beyond --socket, for example {"--budget", "64MiB"}. Returns once the daemon has said
  /// READY=1. The socket is open to every user. Environment entries are "NAME=value".
  /// With POLYKV_TEST_BACKING=cuda in the test's environment, documents are on the test's emulated GPU.
  /// run_as: a user id to run under instead of the test's own, which must be root then.
  explicit DaemonProcess(const std::vector<std::string>& flags = {},
                         const std::vector<std::string>& environment = {},
                         std::optional<uid_t> run_as = std::nullopt)
      : run_as_(run_as) {
    socket_path_ = folder_.path() + "/polykv.sock";
    if (run_as && ::chown(folder_.path().c_str(), *run_as, *run_as) != 0)
      throw std::runtime_error("cannot give the folder away");
    start(with_backing(flags), environment);
    if (!wait_until_ready()) {
      const ExitStatus status = wait();
      throw std::runtime_error("polykvd did not start (" + std::to_string(status.code) +
                               "): " + log());
    }
  }
  /// A test that ends by a failed REQUIRE, or an exception, shows what the daemon complained of.
  ~DaemonProcess() {
    if (std::uncaught_exceptions() > exceptions_before_) show_complaints();
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
  }
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  const std::string& socket_path() const { return socket_path_; }
  const TemporaryFolder& folder() const { return folder_; }
  pid_t pid() const { return pid_; }

  void signal(int number) const { ::kill(pid_, number); }
  /// Waits for its end.
  ExitStatus wait() {
    const ExitStatus status = wait_for_exit(pid_);
    pid_ = -1;
    return status;
  }
  /// SIGTERM, then its end.
  ExitStatus stop() {
    signal(SIGTERM);
    return wait();
  }
  ExitStatus kill() {
    signal(SIGKILL);
    return wait();
  }
  /// Ends it if it runs, and starts it anew on the same socket.
  void restart(const std::vector<std::string>& flags = {}) {
    if (pid_ > 0) stop();
    start(with_backing(flags), {});
    if (!wait_until_ready()) throw std::runtime_error("polykvd did not start again: " + log());
  }

  /// What it wrote to stderr so far.
  std::string log() const {
    std::ifstream file(folder_.path() + "/log");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  /// What it told its service manager until it was ready, a message after the other.
  const std::string& notifications() const { return notifications_; }
  size_t open_descriptor_count() const {
    const std::filesystem::directory_iterator entries("/proc/" + std::to_string(pid_) + "/fd");
    return static_cast<size_t>(std::distance(begin(entries), end(entries)));
  }
  int lowest_free_descriptor() const {
    const std::string folder = "/proc/" + std::to_string(pid_) + "/fd/";
    int number = 0;
    while (std::filesystem::is_symlink(folder + std::to_string(number))) ++number;
    return number;
  }

 private:
  void show_complaints() const {
    std::istringstream lines(log());
    for (std::string line; std::getline(lines, line);) {
      if (line.find("[info]") == std::string::npos) std::cerr << "polykvd: " << line << '\n';
    }
  }

  static std::vector<std::string> with_backing(const std::vector<std::string>& flags) {
    return TestDevice::is_wanted() ? TestDevice::get().flags(flags) : flags;
  }

  void start(const std::vector<std::string>& flags, const std::vector<std::string>& environment) {
    notify_ = UniqueFd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const std::string notify_path = folder_.path() + "/notify";
    ::unlink(notify_path.c_str());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, notify_path.c_str(), sizeof address.sun_path - 1);
    if (::bind(notify_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      throw std::runtime_error("cannot bind the notification socket");
    ::chmod(notify_path.c_str(), 0666);
    std::vector<std::string> arguments = {daemon_path(), "--socket", socket_path_, "--socket-mode",
                                          "0666"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    pid_ = ::fork();
    if (pid_ == 0) execute(arguments, environment, notify_path);
    if (pid_ < 0) throw std::runtime_error("cannot fork");
  }

  [[noreturn]] void execute(std::vector<std::string>& arguments,
                            const std::vector<std::string>& environment,
                            const std::string& notify_path) const {
    const std::string log_path = folder_.path() + "/log";
    const int log = ::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    // Opened now: the other user may not reach the folder that it is in.
    const int program = ::open(arguments[0].c_str(), O_RDONLY | O_CLOEXEC);
    ::dup2(log, STDERR_FILENO);
    ::setenv("NOTIFY_SOCKET", notify_path.c_str(), 1);
    ::unsetenv("JOURNAL_STREAM");
    ::unsetenv("WATCHDOG_USEC");
    ::setenv("XDG_CONFIG_HOME", folder_.path().c_str(), 1);
    for (const std::string& entry : environment) ::putenv(::strdup(entry.c_str()));
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    if (run_as_) become_user(*run_as_);
    ::fexecve(program, pointers.data(), environ);
    ::_exit(127);
  }

  /// False: it ended before it was ready.
  bool wait_until_ready() {
    const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
    while (true) {
      pollfd entries[] = {{notify_.get(), POLLIN, 0}, {pidfd.get(), POLLIN, 0}};
      if (::poll(entries, 2, 60'000) == 0) throw std::runtime_error("polykvd hangs: " + log());
      if ((entries[0].revents & POLLIN) != 0) {
        char text[4096];
        const ssize_t length = ::recv(notify_.get(), text, sizeof text, 0);
        const std::string message(text, length > 0 ? static_cast<size_t>(length) : 0);
        notifications_ += message + '\n';
        if (message.find("READY=1") != std::string::npos) return true;
      } else if ((entries[1].revents & POLLIN) != 0) {
        return false;
      }
    }
  }

  TemporaryFolder folder_;
  std::optional<uid_t> run_as_;
  std::string socket_path_;
  UniqueFd notify_;
  std::string notifications_;
  const int exceptions_before_ = std::uncaught_exceptions();
  pid_t pid_ = -1;
};

/// Runs polykvd to its end, for tests of what it refuses: exit code, and what it printed.
struct DaemonRun {
  ExitStatus status;
  std::string output;
};
inline DaemonRun run_daemon(const std::vector<std::string>& flags) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("cannot make a pipe");
  const UniqueFd reading(ends[0]);
  UniqueFd writing(ends[1]);
  std::vector<std::string> arguments = {POLYKV_DAEMON_PATH};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(writing.get(), STDOUT_FILENO);
    ::dup2(writing.get(), STDERR_FILENO);
    ::unsetenv("NOTIFY_SOCKET");
    ::unsetenv("XDG_RUNTIME_DIR");
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    ::execv(pointers[0], pointers.data());
    ::_exit(127);
  }
  writing.reset();
  DaemonRun run;
  char text[4096];
  for (ssize_t length = 0; (length = ::read(reading.get(), text, sizeof text)) > 0;)
    run.output.append(text, static_cast<size_t>(length));
  run.status = wait_for_exit(pid);
  return run;
}

}  // namespace polykv::test
