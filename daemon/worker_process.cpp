#include "daemon/worker_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/packet_socket.h"

namespace polykv::daemon {

namespace {

constexpr int kWorkerSocket = 3;

class SpawnSettings {
 public:
  SpawnSettings() {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawnattr_init(&attributes_);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  int prepare(int socket) {
    sigset_t none;
    sigset_t all;
    ::sigemptyset(&none);
    ::sigfillset(&all);
    int error = ::posix_spawnattr_setsigmask(&attributes_, &none);
    if (error == 0) error = ::posix_spawnattr_setsigdefault(&attributes_, &all);
    if (error == 0) {
      error =
          ::posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    }
    // The socket first: it may be any number that the others overwrite but 3.
    if (error == 0) error = ::posix_spawn_file_actions_adddup2(&actions_, socket, kWorkerSocket);
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO}) {
      if (error == 0)
        error = ::posix_spawn_file_actions_addopen(&actions_, fd, "/dev/null", O_RDWR, 0);
    }
    if (error == 0)
      error = ::posix_spawn_file_actions_addclosefrom_np(&actions_, kWorkerSocket + 1);
    return error;
  }

  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

Status start_error(const std::string& program, int error_number) {
  return {
      POLYKV_ERR_WORKER,
      format("start '%s': %s; set worker.path in the configuration, or install it", program.c_str(),
             std::strerror(error_number))};  // NOLINT(concurrency-mt-unsafe): known numbers
}

}  // namespace

Result<WorkerProcess::Started> WorkerProcess::start(const std::string& program) {
  POLYKV_ASSIGN_OR_RETURN(auto pair, packet_socketpair());
  auto& [ours, theirs] = pair;
  SpawnSettings settings;
  const int prepared = settings.prepare(theirs.get());
  if (prepared != 0) return start_error(program, prepared);
  std::string argument = program;
  const std::array<char*, 2> arguments = {argument.data(), nullptr};
  Started started;
  const int error = ::posix_spawn(&started.process.pid_, program.c_str(), settings.actions(),
                                  settings.attributes(), arguments.data(), environ);
  if (error != 0) {
    started.process.pid_ = 0;
    return start_error(program, error);
  }
  // Older than the C library's wrapper for it.
  started.process.pidfd_.reset(
      static_cast<int>(::syscall(SYS_pidfd_open, started.process.pid_, 0)));
  if (!started.process.pidfd_) return start_error(program, errno);
  started.socket = std::move(ours);
  return started;
}

WorkerProcess::WorkerProcess(WorkerProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, 0)), pidfd_(std::move(other.pidfd_)) {}

WorkerProcess& WorkerProcess::operator=(WorkerProcess&& other) noexcept {
  if (this != &other) {
    if (pid_ != 0) {
      kill();
      reap();
    }
    pid_ = std::exchange(other.pid_, 0);
    pidfd_ = std::move(other.pidfd_);
  }
  return *this;
}

WorkerProcess::~WorkerProcess() {
  if (pid_ == 0) return;
  kill();
  reap();
}

void WorkerProcess::kill() {
  // Our own unreaped child: its pid cannot be another process's.
  if (pid_ != 0) ::kill(pid_, SIGKILL);
}

std::string WorkerProcess::reap() {
  siginfo_t info{};
  const pid_t pid = std::exchange(pid_, 0);
  while (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED) != 0) {
    if (errno != EINTR) return "ended in an unknown way";
  }
  if (info.si_code == CLD_EXITED) return format("exited with status %d", info.si_status);
  return format("was killed by signal %d (%s)", info.si_status, ::sigdescr_np(info.si_status));
}

Result<std::string> find_worker_program(const std::string& configured) {
  if (!configured.empty()) return configured;
  std::array<char, 4096> path;
  const ssize_t size = ::readlink("/proc/self/exe", path.data(), path.size());
  if (size <= 0 || static_cast<size_t>(size) >= path.size())
    return system_error("find polykvd's own place", errno);
  std::string folder(path.data(), static_cast<size_t>(size));
  folder.resize(folder.rfind('/'));
  const std::string beside = folder + "/polykv-prefill";
  const std::string installed = folder + "/../libexec/polykv/polykv-prefill";
  for (const std::string& candidate : {beside, installed}) {
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return {POLYKV_ERR_WORKER, "find polykv-prefill: it is neither '" + beside + "' nor '" +
                                 installed + "'; set worker.path in the configuration"};
}

}  // namespace polykv::daemon
