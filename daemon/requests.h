// Takes requests apart and hands each to the part of the daemon that answers it.
#pragma once

#include "daemon/acquires.h"
#include "daemon/ingest_service.h"
#include "daemon/leases.h"
#include "daemon/publishing.h"

namespace polykv::daemon {

/// For the loop's thread.
class Requests : public SessionHandler {
 public:
  Requests(Core& core, std::string version);
  /// Null: this daemon has no ingest. Set once, before the first request.
  void set_ingest(IngestService* ingest);
  Leases& leases() { return leases_; }

  void on_session_ready(Session& session) override;
  void on_packet(Session& session, const wire::Packet& packet, std::vector<UniqueFd> fds) override;
  void on_session_end(Session& session) override;

 private:
  bool is_pending(SessionId session, uint64_t request_id) const;
  size_t pending_count(SessionId session) const;
  void on_grown(const std::shared_ptr<Document>& document);
  void on_lost(const std::shared_ptr<Document>& document);
  void on_list(Session& session, uint64_t request_id, const wire::List& request);
  void on_remove(Session& session, uint64_t request_id, const wire::Remove& request);
  Status remove(const Session& session, const wire::Remove& request);
  void on_status(Session& session, uint64_t request_id);
  void on_cancel(Session& session, uint64_t request_id, const wire::Cancel& request);

  Core& core_;
  std::string version_;
  int64_t started_ms_;
  Leases leases_;
  Publishing publishing_;
  Acquires acquires_;
  IngestService* ingest_ = nullptr;
};

}  // namespace polykv::daemon
