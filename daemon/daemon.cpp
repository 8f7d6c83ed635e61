#include "daemon/daemon.h"

#include <sys/random.h>

#include <cerrno>

#include "daemon/cuda_backing.h"
#include "daemon/ingest.h"
#include "daemon/log.h"
#include "polykv/version.h"

namespace polykv::daemon {

namespace {

/// Differs after each start, so that a handle of an earlier one is known as such.
Result<uint64_t> random_epoch() {
  uint64_t epoch = 0;
  while (epoch == 0) {
    if (::getrandom(&epoch, sizeof epoch, 0) != sizeof epoch)
      return system_error("draw a random number", errno);
  }
  return epoch;
}

}  // namespace

Result<std::unique_ptr<Daemon>> Daemon::create(const Options& options, const Limits& limits,
                                               const DeviceChoice& choice) {
  POLYKV_ASSIGN_OR_RETURN(const uint64_t epoch, random_epoch());
  std::unique_ptr<Daemon> daemon(new Daemon(options, limits));
  Daemon* self = daemon.get();
  daemon->memory_ = {options.cgroup_root, options.proc_self_cgroup, options.proc_meminfo};
  POLYKV_ASSIGN_OR_RETURN(daemon->loop_, EventLoop::create());
  daemon->processes_ = std::make_unique<Processes>(
      *daemon->loop_,
      [self](const std::shared_ptr<Process>& process) { self->on_process_gone(process); });
  daemon->pool_ = std::make_unique<ThreadPool>(*daemon->loop_, limits.pool_thread_count);
  if (choice.device) {
    daemon->backing_ = std::make_unique<CudaBacking>(
        *daemon->loop_, *daemon->pool_, self->memory_,
        CudaBacking::Settings{*choice.device, options.cuda_reserve_bytes,
                              limits.memory_reserve_bytes},
        [self](const Status& why) { self->on_device_lost(why); });
  } else {
    daemon->backing_ = std::make_unique<MemfdBacking>(*daemon->pool_, self->memory_,
                                                      limits.memory_reserve_bytes, choice.note);
  }
  const BackingFacts& backing = daemon->backing_->facts();
  daemon->server_ = std::make_unique<Server>(
      *daemon->loop_, self->limits_, *daemon->processes_,
      Server::Identity{epoch, POLYKV_VERSION_TEXT, options.peer_pidfd == PeerPidfd::automatic,
                       backing.name, static_cast<uint32_t>(backing.versions.driver),
                       static_cast<uint32_t>(backing.versions.runtime)});
  daemon->core_ = std::make_unique<Core>(
      Core{*daemon->loop_, *daemon->pool_, self->limits_, self->memory_, *daemon->backing_,
           *daemon->server_, self->segments_, self->catalog_, self->counters_, epoch});
  daemon->requests_ = std::make_unique<Requests>(*daemon->core_, POLYKV_VERSION_TEXT);
  daemon->ingest_ =
      std::make_unique<Ingest>(*daemon->core_, daemon->requests_->leases(), self->options_);
  daemon->requests_->set_ingest(daemon->ingest_.get());
  daemon->server_->set_handler(*daemon->requests_);
  return daemon;
}

Daemon::~Daemon() = default;

void Daemon::on_process_gone(const std::shared_ptr<Process>& process) {
  server_->end_sessions_of(*process);
  // After the sessions' own ends, which are deferred as well: leases first, then what was held.
  loop_->defer([this, process] { segments_.release_all(*process); });
}

Status Daemon::serve(UniqueFd listening_socket) {
  POLYKV_RETURN_IF_ERROR(server_->listen(std::move(listening_socket)));
  loop_->run();
  return ended_;
}

void Daemon::on_device_lost(const Status& why) {
  ended_ = {why.code(), "serve documents in GPU memory: " + why.message() +
                            "; polykvd ends, start it again once the GPU works"};
  log_error("%s", ended_.message().c_str());
  if (ingest_) ingest_->stop();
  server_->stop(ended_);
  loop_->stop();
}

void Daemon::stop() {
  if (ingest_) ingest_->stop();
  server_->stop();
  loop_->stop();
}

}  // namespace polykv::daemon
