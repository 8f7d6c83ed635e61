// polykvd put together: owns the loop, the threads, the catalog and the server.
#pragma once

#include <memory>

#include "daemon/core.h"
#include "daemon/device_start.h"
#include "daemon/listener.h"
#include "daemon/options.h"
#include "daemon/requests.h"

namespace polykv::daemon {

/// Created and run on one thread.
class Daemon {
 public:
  static Result<std::unique_ptr<Daemon>> create(const Options& options, const Limits& limits,
                                                const DeviceChoice& choice = {});
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  /// Serves connections until stop(). POLYKV_ERR_DEVICE_LOST: the GPU with the documents stopped
  /// working; every session was told.
  Status serve(UniqueFd listening_socket);
  /// Ends sessions and workers; serve() returns soon.
  void stop();

  EventLoop& loop() { return *loop_; }
  Core& core() { return *core_; }
  Requests& requests() { return *requests_; }

 private:
  Daemon(const Options& options, const Limits& limits) : options_(options), limits_(limits) {}
  void on_process_gone(const std::shared_ptr<Process>& process);
  void on_device_lost(const Status& why);

  Options options_;
  Limits limits_;
  MemoryProbe memory_;
  Segments segments_;
  Catalog catalog_{segments_};
  Counters counters_;
  // In the order of construction; destroyed in reverse, the threads before what their results use.
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Processes> processes_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Core> core_;
  std::unique_ptr<Requests> requests_;
  std::unique_ptr<IngestService> ingest_;
  std::unique_ptr<Backing> backing_;
  std::unique_ptr<ThreadPool> pool_;
  Status ended_;  // why serve() returns
};

}  // namespace polykv::daemon
