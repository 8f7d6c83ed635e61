// The seam between the server and ingest (polykv-prefill, its jobs, models and fingerprints).
//
// A worker is a Session of kind worker over one end of a socket pair (Server::adopt_worker). After
// its Hello it gets on_worker_ready, which sends WorkerStart. It publishes with the messages of any
// producer: Acquire{job, may_produce}; the server asks job_context() whose domain, name and sharing
// that is. Everything is for the loop's thread.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "daemon/documents.h"
#include "daemon/server.h"

namespace polykv::daemon {

/// On whose behalf a worker publishes.
struct JobContext {
  Domain domain = 0;  // the caller's user id, or kPublicDomain
  uid_t owner = 0;    // the caller
  std::string name;   // the document gets it; may be empty
  bool replace_name = false;
};

class IngestService {
 public:
  using IdentityCallback = std::function<void(Result<ModelIdentity>)>;

  virtual ~IngestService() = default;

  /// An Ingest request with the descriptors it announces. Replies now or later: with
  /// Leases::grant, Done or Error.
  virtual void on_ingest(Session& session, uint64_t request_id, const wire::Ingest& request,
                         std::vector<UniqueFd> fds) = 0;
  /// Cancel for a request that is this service's. True: it was, and has been answered with
  /// CANCELLED (the Cancel itself is answered by the caller).
  virtual bool cancel(SessionId session, uint64_t request_id) = 0;
  virtual bool is_pending(SessionId session, uint64_t request_id) const = 0;
  /// How many requests of a session wait here, for its limit.
  virtual size_t pending_count(SessionId session) const = 0;

  virtual void on_worker_ready(Session& worker) = 0;
  /// WorkerReady, WorkerFailed, JobProgress, JobDone.
  virtual void on_worker_packet(Session& worker, const wire::Packet& packet) = 0;
  /// Of clients and workers.
  virtual void on_session_end(Session& session) = 0;

  /// Nothing: no such job runs on this worker.
  virtual std::optional<JobContext> job_context(SessionId worker, uint64_t job) const = 0;

  /// Which model a client means that gave a name of the configuration, or a model file (model_fd,
  /// then model_name is empty). From the fingerprint cache, else by an identify run of the worker.
  /// The callback runs at once or later, once.
  virtual void identify(uid_t uid, const std::string& model_name, UniqueFd model_fd,
                        IdentityCallback callback) = 0;

  virtual uint64_t worker_count() const = 0;
  /// The daemon stops: end workers.
  virtual void stop() = 0;
};

}  // namespace polykv::daemon
