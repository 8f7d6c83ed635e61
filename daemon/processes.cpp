#include "daemon/processes.h"

#include <sys/epoll.h>

#include "daemon/peer_identity.h"

namespace polykv::daemon {

Processes::~Processes() {
  for (auto& [pid, process] : processes_) loop_.unwatch(process->pidfd.get());
}

Result<std::shared_ptr<Process>> Processes::attach(pid_t pid, uid_t uid, UniqueFd pidfd) {
  const auto found = processes_.find(pid);
  if (found != processes_.end()) {
    // A PID is used again only after its process was reaped, and the pidfd is readable before
    // that: unreadable means that this is the same process.
    if (!pidfd_has_exited(found->second->pidfd.get())) {
      ++found->second->connection_count;
      return found->second;
    }
    gone(pid);
  }
  auto process = std::make_shared<Process>();
  process->pid = pid;
  process->uid = uid;
  process->pidfd = std::move(pidfd);
  process->connection_count = 1;
  POLYKV_RETURN_IF_ERROR(
      loop_.watch(process->pidfd.get(), EPOLLIN, [this, pid](uint32_t) { gone(pid); }));
  processes_.emplace(pid, process);
  return process;
}

void Processes::detach(Process& process) {
  assert(process.connection_count > 0);
  --process.connection_count;
  if (process.connection_count == 0 && process.holdings.empty() && !process.is_gone)
    forget(process.pid);
}

void Processes::gone(pid_t pid) {
  const std::shared_ptr<Process> process = processes_.at(pid);
  process->is_gone = true;
  forget(pid);
  on_gone_(process);
}

void Processes::forget(pid_t pid) {
  const auto found = processes_.find(pid);
  loop_.unwatch(found->second->pidfd.get());
  processes_.erase(found);
}

}  // namespace polykv::daemon
