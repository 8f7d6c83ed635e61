// polykv-prefill processes: started on demand, one per (user, model file), given one job after the
// other, watched, and stopped when idle.
//
//   starting -> ready <-> busy -> ending -> (reaped)
//
// A worker that dies or falls silent during a job takes that job with it, with an error that says
// so; those that wait behind it go to a new worker. One that never got ready, or says that its model
// is no good, takes them all. Everything is for the loop's thread; nothing here blocks.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/result.h"
#include "common/wire.h"
#include "daemon/core.h"
#include "daemon/event_loop.h"
#include "daemon/fingerprint_cache.h"
#include "daemon/server.h"
#include "daemon/worker_process.h"
#include "include/internal/worker_device.h"

namespace polykv::daemon {

using JobId = uint64_t;     // ascending, never used again; 0: none
using WorkerId = uint64_t;  // the same

/// A model file as one user may use it.
struct ModelFile {
  ModelKey key;
  std::string name;  // for messages
  SharedFd file;
};

/// What the worker is to compute. `fds` as JobStart says.
struct JobSpec {
  bool has_text_fd = false;
  uint64_t token_count = 0;
  bool has_before_fd = false;
  uint32_t profile = 0;
  bool add_bos = false;
  bool parse_special = false;
  bool chat_head = false;
  std::optional<Digest> extends;
  bool recompute_prefix = false;
  std::vector<SharedFd> fds;
};

struct JobProgress {
  uint32_t phase = 0;  // polykv_ingest_phase
  uint64_t tokens_done = 0;
  uint64_t token_count = 0;
  uint64_t memory_bytes = 0;
};

struct JobCallbacks {
  std::function<void(const JobProgress&)> on_progress;
  /// Once, last. `digest` is the sealed document's when the status is ok.
  std::function<void(const Status&, const Digest& digest)> on_end;
};

struct WorkersConfig {
  std::string program;  // empty: find_worker_program()
  uint32_t thread_count = 1;
  WorkerDevice device = WorkerDevice::automatic;
  std::string cuda_library;
  std::string gpu_uuid;             // to compute on; empty: the first
  bool documents_on_gpu = false;    // they are in the memory of that one
  uint64_t memory_limit_bytes = 0;  // of each worker; 0: none
  /// What the daemon's control groups, which are the workers' as well, have left; asked for each
  /// job. Their limit kills, so it must not be reached. Empty: there is no limit.
  std::function<std::optional<uint64_t>()> control_group_free_bytes;
  uint64_t text_limit_bytes = uint64_t{64} << 20;
  int64_t idle_ms = 60'000;
  int64_t stall_deadline_ms = 30'000;
  /// For reading and hashing a model file, from the start of the process on.
  int64_t start_deadline_ms = 600'000;
  size_t worker_count_max = 8;
  size_t jobs_per_worker_max = 256;
};

class Workers {
 public:
  Workers(EventLoop& loop, Server& server, Counters& counters, WorkersConfig config);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// Queues a job; callbacks come later, never from within. ERR_LIMIT, ERR_WORKER.
  Result<JobId> submit(const ModelFile& model, JobSpec spec, JobCallbacks callbacks);
  /// Ends a job with ERR_CANCELLED: at once while it is queued, after its chunk when it runs. A job
  /// that is over is fine.
  void cancel(JobId job);

  /// Tells which model a file holds, from the cache (then at once, from within) or by asking a
  /// worker.
  using OnIdentified = std::function<void(Result<ModelIdentity>)>;
  void identify(const ModelFile& model, OnIdentified on_identified);

  /// WorkerReady, WorkerFailed, JobProgress, JobDone of a worker's session.
  void on_packet(SessionId session, const wire::Packet& packet);
  void on_session_ready(SessionId session);
  void on_session_end(SessionId session);
  /// The job that this worker's session works on, 0: none.
  JobId running_job(SessionId session) const;

  /// Those that still have a process.
  size_t worker_count() const { return workers_.size(); }
  /// Kills all of them and answers nobody: the daemon ends.
  void stop();

 private:
  struct Job {
    JobId id = 0;
    JobSpec spec;
    JobCallbacks callbacks;
    uint64_t prefilled_tokens = 0;
    bool is_cancelled = false;
  };
  enum class State { starting, ready, ending };
  struct Worker {
    WorkerId id = 0;
    State state = State::starting;
    ModelFile model;
    WorkerProcess process;
    SessionId session = 0;
    std::optional<ModelIdentity> identity;  // once ready
    std::unique_ptr<Job> running;
    std::deque<std::unique_ptr<Job>> queue;
    std::vector<OnIdentified> identify_waiters;
    Status failure;                // why it has to end; ok: nobody knows yet
    EventLoop::TimerId timer = 0;  // start, stall, idle or kill deadline, by state
  };

  Worker* find_session(SessionId session);
  const ModelIdentity* known_model(const ModelKey& key);
  Result<Worker*> worker_for(const ModelFile& model);
  Status make_room();
  Result<Worker*> start_worker(const ModelFile& model);
  void send_settings(Worker& worker);
  void start_next_job(Worker& worker);
  void send_job(const Worker& worker);
  void arm_timer(Worker& worker);
  void on_timer(WorkerId id);
  /// No more jobs for it. `failure` ok: it is merely not needed.
  void end_worker(Worker& worker, Status failure);
  void fail_running(Worker& worker, const Status& status);
  void fail_everything(Worker& worker, const Status& status);
  /// The queue of a worker that is gone goes to another one.
  void hand_over(Worker& worker);
  void on_process_end(WorkerId id);

  void on_ready(Worker& worker, const wire::WorkerReady& ready);
  void on_progress(Worker& worker, const wire::JobProgress& progress);
  void on_done(Worker& worker, const wire::JobDone& done);
  void count_prefilled(Job& job, uint64_t tokens);

  EventLoop& loop_;
  Server& server_;
  Counters& counters_;
  WorkersConfig config_;
  FingerprintCache fingerprints_;
  JobId next_job_ = 1;
  WorkerId next_worker_ = 1;
  std::map<WorkerId, std::unique_ptr<Worker>> workers_;
  std::map<ModelKey, WorkerId> serving_;  // those that take jobs
};

}  // namespace polykv::daemon
