// Leases: the right to read a document, bound to a connection; and the way its segments'
// descriptors reach the client, a bounded number of packets ahead of its acknowledgements. A document
// that is still being produced sends them as they are sealed.
#pragma once

#include <deque>

#include "daemon/core.h"
#include "daemon/handles.h"

namespace polykv::daemon {

struct Lease {
  SessionId session = 0;
  uint64_t request_id = 0;  // whose events carry the segments
  std::shared_ptr<Process> process;
  std::shared_ptr<Document> document;
  size_t held_count = 0;  // segments that are charged to the process
  size_t sent_count = 0;
  size_t received_count = 0;          // acknowledged
  std::deque<size_t> unacknowledged;  // sent_count after each packet that is not acknowledged
  bool is_told_stalled = false;       // since the last segment
};

/// For the loop's thread.
class Leases {
 public:
  explicit Leases(Core& core) : core_(core), table_(HandleKind::lease, core.epoch) {}

  /// Replies LeaseGranted to a request and begins to send the segments; or Error (LIMIT). The
  /// document is sealed, filling, or a view; the session ready.
  void grant(SessionId session, uint64_t request_id, const std::shared_ptr<Document>& document);
  /// The document has a segment more, or is complete.
  void on_grown(const Document& document);
  /// Nobody produces the document any more: tells those that wait for the rest.
  void on_stalled(const Document& document);
  void on_ack(Session& session, const wire::SegmentAck& ack);
  void on_release(Session& session, uint64_t request_id, const wire::Release& release);
  /// Ends its leases. What its process received stays charged to it until it is gone.
  void on_session_end(const Session& session);

  uint64_t lease_count() const { return table_.live_count(); }

 private:
  std::shared_ptr<Lease> find(const Session& session, const Handle& handle) const;
  void hold_segments(Lease& lease);
  void send_segments(const Handle& handle, Lease& lease);
  void end(const Handle& handle, Lease& lease);

  Core& core_;
  HandleTable<Lease> table_;
  std::map<SessionId, std::vector<Handle>> of_session_;
  std::map<const Document*, std::vector<Handle>> growing_;  // of documents that are not complete
};

}  // namespace polykv::daemon
