// Leases: the right to read a document, bound to a connection; and the way its segments'
// descriptors reach the client, a bounded number of packets ahead of its acknowledgements.
#pragma once

#include "daemon/core.h"
#include "daemon/handles.h"

namespace polykv::daemon {

struct Lease {
  SessionId session = 0;
  uint64_t request_id = 0;  // whose events carry the segments
  std::shared_ptr<Process> process;
  std::shared_ptr<Document> document;
  size_t sent_count = 0;      // segments
  size_t received_count = 0;  // acknowledged segments
};

/// For the loop's thread.
class Leases {
 public:
  explicit Leases(Core& core) : core_(core), table_(HandleKind::lease, core.epoch) {}

  /// Replies LeaseGranted to a request and begins to send the segments; or Error (LIMIT). The
  /// document is sealed, and the session ready.
  void grant(SessionId session, uint64_t request_id, const std::shared_ptr<Document>& document);
  void on_ack(Session& session, const wire::SegmentAck& ack);
  void on_release(Session& session, uint64_t request_id, const wire::Release& release);
  /// Ends its leases. What its process received stays charged to it until it is gone.
  void on_session_end(const Session& session);

  uint64_t lease_count() const { return table_.live_count(); }

 private:
  std::shared_ptr<Lease> find(const Session& session, const Handle& handle) const;
  void send_segments(const Handle& handle, Lease& lease);
  void end(const Handle& handle, Lease& lease);

  Core& core_;
  HandleTable<Lease> table_;
  std::map<SessionId, std::vector<Handle>> of_session_;
};

}  // namespace polykv::daemon
