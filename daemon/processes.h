// Client processes, watched by pidfd: a process that died ends its sessions and holds nothing any
// more, whoever inherited its sockets.
#pragma once

#include <functional>
#include <map>

#include "daemon/event_loop.h"
#include "daemon/segments.h"

namespace polykv::daemon {

/// For the loop's thread.
class Processes {
 public:
  /// on_gone runs once for each process that exits, before it is forgotten.
  Processes(EventLoop& loop, std::function<void(const std::shared_ptr<Process>&)> on_gone)
      : loop_(loop), on_gone_(std::move(on_gone)) {}
  ~Processes();

  /// One more connection of a process. The pidfd is of that very process.
  Result<std::shared_ptr<Process>> attach(pid_t pid, uid_t uid, UniqueFd pidfd);
  /// One connection fewer; a process that holds segments is remembered until it is gone.
  void detach(Process& process);

 private:
  void gone(pid_t pid);
  void forget(pid_t pid);

  EventLoop& loop_;
  std::function<void(const std::shared_ptr<Process>&)> on_gone_;
  std::map<pid_t, std::shared_ptr<Process>> processes_;
};

}  // namespace polykv::daemon
