// Acquire: find a document, become its producer, or wait for whoever produces it.
//
//   identify (model name or file) -> read tokens and hash the chain (thread pool if long) -> resolve
//
// resolve: a sealed document of the caller's domain, then of the public one; else a flight (wait, or
// BUSY, or its segments as they come); else the tokens as far as segments hold them already, whatever
// document they are of: all of them are a document; a part is what a producer begins behind, once
// nobody is about to seal a longer one. Else NOT_FOUND. A document of another domain is not looked
// at, so it cannot be told from a miss.
#pragma once

#include <atomic>
#include <optional>

#include "daemon/ingest_service.h"
#include "daemon/leases.h"
#include "daemon/publishing.h"

namespace polykv::daemon {

/// For the loop's thread.
class Acquires {
 public:
  Acquires(Core& core, Leases& leases, Publishing& publishing)
      : core_(core), leases_(leases), publishing_(publishing) {}
  /// Null: this daemon has no ingest. Set once, before the first request.
  void set_ingest(IngestService* ingest) { ingest_ = ingest; }

  void on_acquire(Session& session, uint64_t request_id, const wire::Acquire& request,
                  std::vector<UniqueFd> fds);
  /// True: the request waited here and has been answered with CANCELLED.
  bool cancel(SessionId session, uint64_t request_id);
  bool is_pending(SessionId session, uint64_t request_id) const;
  size_t pending_count(SessionId session) const;
  void on_session_end(const Session& session);

  /// Of Publishing: answers those that wait for the document, or for the prefix that they share.
  void on_grown(const Document& document);
  void on_sealed(const Document& document);
  /// The next waiter that may produce becomes the producer.
  void on_lost(const Document& document);

 private:
  struct Pending {
    uint64_t id = 0;  // in order of arrival
    SessionId session = 0;
    uint64_t request_id = 0;
    Domain domain = 0;
    uid_t owner = 0;
    Selector selector;
    ModelIdentity identity;  // with tokens only
    Digest root{};
    std::shared_ptr<const std::vector<Digest>> chain;
    std::shared_ptr<const void> token_charge;
    uint64_t token_count = 0;
    SharedFd token_fd;
    bool may_produce = false;
    bool wait = false;
    bool stream = false;
    bool replace_name = false;
    std::optional<Digest> extends;
    std::string publish_name;
    int64_t timeout_ms = -1;
    EventLoop::TimerId timer = 0;
    std::optional<DocumentKey> waiting_on;
    uint64_t waiting_tokens = 0;  // as many of them as are shared; 0: all of the document
  };
  using PendingPtr = std::shared_ptr<Pending>;

  Status parse(Pending& pending, const Session& session, const wire::Acquire& request,
               std::vector<UniqueFd>& fds) const;
  Status parse_selector(Pending& pending, const wire::Acquire& request) const;
  Status parse_caller(Pending& pending, const Session& session, const wire::Acquire& request) const;
  Status charge_tokens(Pending& pending) const;
  void hash_tokens(const PendingPtr& pending);
  void resolve(const PendingPtr& pending);
  Status on_ticket(const Session& session, uint64_t request_id, const wire::Acquire& request);
  void join(const PendingPtr& pending, const Flight& flight);
  void park(const PendingPtr& pending, const Flight& flight, uint64_t shared_tokens);
  void continue_prefix(const PendingPtr& pending);
  Result<std::vector<SegmentPart>> base_parts(const Pending& pending) const;
  std::vector<SegmentPart> longest_prefix(Pending& pending) const;
  bool wait_for_prefix(const PendingPtr& pending, uint64_t token_count);
  std::shared_ptr<Document> new_document(const Pending& pending);
  void grant_covered(const PendingPtr& pending, std::vector<SegmentPart> parts);
  void produce(const PendingPtr& pending, std::vector<SegmentPart> parts);
  void miss(const PendingPtr& pending);
  void fail(const PendingPtr& pending, const Status& why);
  void forget(const Pending& pending);
  PendingPtr find(uint64_t id) const;
  std::vector<PendingPtr> waiters_of(const DocumentKey& key) const;
  static Status one_segment_only(const std::string& operation, Profile profile);
  /// "acquire 'name'" or "acquire", for messages.
  static std::string subject(const Pending& pending);

  Core& core_;
  Leases& leases_;
  Publishing& publishing_;
  IngestService* ingest_ = nullptr;
  uint64_t next_id_ = 1;
  /// Bytes of all token lists. Given back on whatever thread drops the last owner of a list, which
  /// orders nothing else: relaxed.
  std::shared_ptr<std::atomic<uint64_t>> token_bytes_ = std::make_shared<std::atomic<uint64_t>>(0);
  std::map<uint64_t, PendingPtr> pending_;
};

}  // namespace polykv::daemon
