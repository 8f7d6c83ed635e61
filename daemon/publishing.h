// Publishing: tickets, and the segments that their holders reserve, fill and commit.
//
// A ticket is the right to produce one document (domain, digest, profile); a flight is that
// production. It ends when the last segment is committed, when its connection ends, when it is
// given up, or when neither a commit nor progress came for the stall deadline. What was committed by
// then stays, and the next producer of the document goes on behind it.
#pragma once

#include <functional>

#include "daemon/core.h"
#include "daemon/handles.h"

namespace polykv::daemon {

struct OpenSegment;

struct Flight {
  SessionId session = 0;               // the producer's
  std::shared_ptr<Document> document;  // filling; its names: the one that it will get
  bool replace_name = false;
  Handle ticket;
  std::shared_ptr<OpenSegment> open_segment;  // reserved or filling; one at a time
  std::weak_ptr<Document> sealed_view;        // what is sealed, while somebody leases that
  EventLoop::TimerId stall_timer = 0;
};

/// A segment in a producer's hands. Its handle stays valid after the flight was lost, so that the
/// producer can tell that it has unmapped.
struct OpenSegment {
  SessionId session = 0;
  Handle handle;
  std::shared_ptr<Process> process;
  std::shared_ptr<Segment> segment;
  std::weak_ptr<Flight> flight;
  std::shared_ptr<const SegmentPromise> promise;  // shared with the thread pool
  bool is_committing = false;
};

/// For the loop's thread.
class Publishing {
 public:
  struct Events {
    std::function<void(const std::shared_ptr<Document>&)> on_grown;   // by a sealed segment
    std::function<void(const std::shared_ptr<Document>&)> on_sealed;  // it can be found from now on
    std::function<void(const std::shared_ptr<Document>&)> on_lost;    // nobody produces it any more
  };

  Publishing(Core& core, Events events);

  /// Makes the session the producer of a document in state filling, from its end_token() on, and
  /// replies TicketGranted; or Error, and the document is dropped. Nobody else produces it.
  void grant(SessionId session, uint64_t request_id, std::shared_ptr<Document> document,
             bool replace_name);
  /// The flight of a domain that a selector means; null: none.
  std::shared_ptr<Flight> find(Domain domain, const Selector& selector) const;
  /// The flight that will seal the longest prefix of these tokens, and how many tokens that is, a
  /// multiple of 256; {null, 0}: none.
  struct SharedFlight {
    std::shared_ptr<Flight> flight;
    uint64_t token_count = 0;
  };
  SharedFlight find_shared(Domain domain, Profile profile, const std::vector<Digest>& chain) const;
  /// POLYKV_ERR_ALREADY_EXISTS when another document than `key` has the name or is promised it, and
  /// may not lose it.
  Status check_name_free(const DocumentKey& key, const std::string& name, bool replace) const;
  /// Whether the session produces anything.
  bool produces(SessionId session) const;
  /// Of a ticket of this session; null: it is stale.
  std::shared_ptr<Flight> find_ticket(const Session& session, const wire::Handle* handle) const;

  void on_reserve(Session& session, uint64_t request_id, const wire::SegmentReserve& wire);
  void on_commit(Session& session, uint64_t request_id, const wire::SegmentCommit& request);
  void on_segment_abort(Session& session, uint64_t request_id, const wire::SegmentAbort& request);
  void on_progress(Session& session, uint64_t request_id, const wire::TicketProgress& request);
  void on_ticket_abort(Session& session, uint64_t request_id, const wire::TicketAbort& request);
  void on_session_end(const Session& session);

 private:
  std::shared_ptr<OpenSegment> find_segment(const Session& session,
                                            const wire::Handle* handle) const;
  Status check_document(const Document& document, bool replace_name, SessionId session) const;
  struct ReserveRequest {
    Handle ticket;
    uint64_t first_token = 0;
    uint64_t token_count = 0;
    uint32_t chosen_exact_rows = 0;
    bool has_certificate = false;
    bool into_device = false;
    std::vector<Profile> layer_profiles;
  };
  static ReserveRequest parse_reserve(const wire::SegmentReserve& wire);
  Result<SegmentPromise> promise(const Flight& flight, const ReserveRequest& request) const;
  void reserve(SessionId session, uint64_t request_id, const ReserveRequest& request,
               const Result<std::vector<MemoryHeadroom>>& headrooms);
  Status make_room(uint64_t needed_bytes, std::span<const MemoryHeadroom> headrooms);
  void on_allocated(SessionId session, const Handle& handle, uint64_t request_id,
                    Result<SegmentMemory> memory);
  void reply_reserved(const OpenSegment& open, uint64_t request_id);
  void on_verified(SessionId session, const Handle& handle, uint64_t request_id,
                   Result<SealedSegment> sealed);
  void accept_segment(OpenSegment& open, uint64_t request_id, SealedSegment sealed);
  void reclaim(OpenSegment& open);
  void let_go(OpenSegment& open);
  void close_segment(OpenSegment& open);
  void renew(const std::shared_ptr<Flight>& flight);
  void complete(const std::shared_ptr<Flight>& flight);
  void give_up(const std::shared_ptr<Document>& document);
  void lose(const std::shared_ptr<Flight>& flight, const char* why);
  void end_flight(Flight& flight);

  Core& core_;
  Events events_;
  HandleTable<Flight> tickets_;
  HandleTable<OpenSegment> open_segments_;
  std::map<DocumentKey, std::shared_ptr<Flight>> flights_;
  std::map<SessionId, std::set<std::shared_ptr<OpenSegment>>> segments_of_session_;
};

}  // namespace polykv::daemon
