// A polykv-prefill process: started with nothing but a socket, watched by a pidfd, ended by
// SIGKILL.
#pragma once

#include <sys/types.h>

#include <string>

#include "common/fd.h"
#include "common/result.h"

namespace polykv::daemon {

/// Owns the child process and its pidfd. The destructor kills what still runs, and reaps it: after
/// SIGKILL that does not wait for long.
class WorkerProcess {
 public:
  struct Started;

  /// Starts `program` with one end of a new socket pair as descriptor 3, /dev/null as 0 and 1, this
  /// process's standard error as 2, no other descriptor and no signal blocked. The calling thread
  /// must live as long as the worker should: the worker dies with it. ERR_WORKER names the program.
  static Result<Started> start(const std::string& program);

  WorkerProcess() = default;
  WorkerProcess(WorkerProcess&& other) noexcept;
  WorkerProcess& operator=(WorkerProcess&& other) noexcept;
  ~WorkerProcess();

  pid_t pid() const { return pid_; }
  /// Readable once the process has ended.
  int pidfd() const { return pidfd_.get(); }

  void kill();
  /// How it ended: "was killed by signal 9 (Killed)", "exited with status 21". Waits for the end;
  /// once.
  std::string reap();

 private:
  pid_t pid_ = 0;  // 0: none, or reaped
  UniqueFd pidfd_;
};

struct WorkerProcess::Started {
  WorkerProcess process;
  UniqueFd socket;  // our end
};

/// Where polykv-prefill is: `configured` unless it is empty, else beside this program, else in
/// ../libexec/polykv from there. ERR_WORKER names the places that were tried.
Result<std::string> find_worker_program(const std::string& configured);

}  // namespace polykv::daemon
