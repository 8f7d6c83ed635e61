// Ingest requests of clients, and the question which model a file holds: opens configured models,
// hands jobs to the workers, and turns what comes of them into replies.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "daemon/core.h"
#include "daemon/ingest_service.h"
#include "daemon/leases.h"
#include "daemon/options.h"
#include "daemon/workers.h"

namespace polykv::daemon {

class Ingest final : public IngestService {
 public:
  Ingest(Core& core, Leases& leases, const Options& options);

  void on_ingest(Session& session, uint64_t request_id, const wire::Ingest& request,
                 std::vector<UniqueFd> fds) override;
  bool cancel(SessionId session, uint64_t request_id) override;
  bool is_pending(SessionId session, uint64_t request_id) const override {
    return requests_.contains({session, request_id});
  }
  size_t pending_count(SessionId session) const override;
  void on_worker_ready(Session& worker) override;
  void on_worker_packet(Session& worker, const wire::Packet& packet) override;
  void on_session_end(Session& session) override;
  std::optional<JobContext> job_context(SessionId worker, uint64_t job) const override;
  void identify(uid_t uid, const std::string& model_name, UniqueFd model_fd,
                IdentityCallback callback) override;
  uint64_t worker_count() const override { return workers_.worker_count(); }
  void stop() override { workers_.stop(); }

 private:
  using RequestKey = std::pair<SessionId, uint64_t>;
  struct Request {
    JobId job = 0;
    std::optional<Digest> extends;
    std::string moved_name;  // from the document that is extended to the longer one
    JobContext context;
    Profile profile = Profile::any;
    bool want_lease = false;
  };

  Result<Request> read_request(const Session& session, const wire::Ingest& request) const;
  Status read_extension(const Session& session, const wire::Ingest& request, Request& result) const;
  Result<ModelFile> open_model(uid_t uid, const std::string& model_name, UniqueFd model_fd) const;
  Result<JobId> submit(RequestKey key, const Session& session, const Request& what,
                       const wire::Ingest& request, std::vector<UniqueFd> fds);
  void on_job_progress(RequestKey key, const JobProgress& progress);
  void on_job_end(RequestKey key, const Status& status, const Digest& digest);
  Status move_name(Document& document, const Request& request);
  Result<std::shared_ptr<Document>> finish(const Request& request, const Digest& digest);

  Core& core_;
  Leases& leases_;
  std::vector<ConfiguredModel> models_;
  Workers workers_;
  std::map<RequestKey, Request> requests_;
};

}  // namespace polykv::daemon
