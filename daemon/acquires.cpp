#include "daemon/acquires.h"

#include <algorithm>
#include <chrono>

#include "common/memfd.h"

namespace polykv::daemon {

namespace {

Status wrong(const std::string& why) {
  return {POLYKV_ERR_INVALID_ARGUMENT, "acquire: " + why};
}

// A shorter list is read and hashed on the spot: a fraction of a millisecond, less than two thread
// switches cost on a busy machine.
constexpr uint64_t kInlineTokens = 32'768;

struct HashedTokens {
  std::shared_ptr<const std::vector<uint32_t>> tokens;
  Digest root{};
  std::shared_ptr<const std::vector<Digest>> chain;
};

/// A list of ids that gives its charge back when it goes.
struct ChargedTokens {
  std::vector<uint32_t> ids;
  std::shared_ptr<const void> charge;
};

Result<HashedTokens> read_and_hash(int fd, uint64_t token_count, uint64_t token_count_max,
                                   const ModelIdentity& identity,
                                   std::shared_ptr<const void> charge) {
  POLYKV_ASSIGN_OR_RETURN(std::vector<uint32_t> ids,
                          memfd_read_tokens(fd, token_count, token_count_max));
  HashedTokens hashed;
  hashed.root = chain_root(identity);
  hashed.chain = std::make_shared<const std::vector<Digest>>(chain_digests(hashed.root, ids));
  const auto owner =
      std::make_shared<const ChargedTokens>(ChargedTokens{std::move(ids), std::move(charge)});
  hashed.tokens = std::shared_ptr<const std::vector<uint32_t>>(owner, &owner->ids);
  return hashed;
}

}  // namespace

// ---- the request -------------------------------------------------------------------------------

Status Acquires::parse_selector(Pending& pending, const wire::Acquire& request) const {
  const bool by_name = request.name() != nullptr && request.name()->size() > 0;
  const bool by_digest = request.digest() != nullptr;
  const bool by_model_name = request.model_name() != nullptr && request.model_name()->size() > 0;
  const bool is_extension = request.extends() != nullptr;
  const int model_ways = (request.model() != nullptr ? 1 : 0) + (by_model_name ? 1 : 0) +
                         (request.has_model_fd() ? 1 : 0);
  if ((by_name ? 1 : 0) + (by_digest ? 1 : 0) + model_ways != 1) {
    return wrong(
        "say which document in exactly one way: name, digest, model, model_name or model_fd");
  }
  if (strcmp(profile_name(static_cast<Profile>(request.profile())), "unknown") == 0)
    return wrong(format("profile %u is unknown", request.profile()));
  pending.selector.profile = static_cast<Profile>(request.profile());
  pending.token_count = request.token_count();
  if (model_ways == 0) {
    if (request.token_count() > 0) return wrong("tokens go with a model only");
    if (request.may_produce() || is_extension) return wrong("a producer names a model and tokens");
    if (by_name) {
      pending.selector.name = text_or_empty(request.name());
      return check_name(pending.selector.name).with_context("acquire");
    }
    pending.selector.digest = from_wire(*request.digest());
    return Status::ok();
  }
  if (request.token_count() == 0) {
    return {POLYKV_ERR_EMPTY_DOCUMENT, "acquire: a document has at least one token; give tokens"};
  }
  if (request.may_produce() && pending.selector.profile == Profile::any)
    return wrong("a producer names a profile, not 'any'");
  if (request.model() != nullptr) {
    POLYKV_ASSIGN_OR_RETURN(pending.identity, from_wire(*request.model()));
  }
  return Status::ok();
}

Status Acquires::parse_caller(Pending& pending, const Session& session,
                              const wire::Acquire& request) const {
  pending.domain = session.uid;
  pending.owner = session.uid;
  pending.publish_name = text_or_empty(request.publish_name());
  pending.replace_name = request.replace_name();
  if (session.kind == SessionKind::worker) {
    const std::optional<JobContext> job =
        ingest_ == nullptr ? std::nullopt : ingest_->job_context(session.id, request.job());
    if (!job) return {POLYKV_ERR_STALE, "acquire: no such job; it was cancelled"};
    pending.domain = job->domain;
    pending.owner = job->owner;
    pending.publish_name = job->name;
    pending.replace_name = job->replace_name;
  } else if (request.is_public() || request.job() != 0) {
    return {POLYKV_ERR_PERMISSION,
            "acquire: only polykvd's own worker publishes for everybody; use ingest with a "
            "configured model and --share public"};
  }
  if (!pending.publish_name.empty())
    return check_name(pending.publish_name).with_context("acquire");
  return Status::ok();
}

Status Acquires::parse(Pending& pending, const Session& session, const wire::Acquire& request,
                       std::vector<UniqueFd>& fds) const {
  POLYKV_RETURN_IF_ERROR(parse_selector(pending, request));
  POLYKV_RETURN_IF_ERROR(parse_caller(pending, session, request));
  if (request.timeout_ms() < -1) return wrong("a timeout is -1 (none) or at least 0 ms");
  pending.may_produce = request.may_produce();
  pending.wait = request.wait();
  pending.stream = request.stream();
  if (request.extends() != nullptr) pending.extends = from_wire(*request.extends());
  pending.timeout_ms = request.timeout_ms();
  POLYKV_RETURN_IF_ERROR(charge_tokens(pending));
  if (request.token_count() > 0)
    pending.token_fd = std::make_shared<const UniqueFd>(std::move(fds.back()));
  return Status::ok();
}

void Acquires::on_acquire(Session& session, uint64_t request_id, const wire::Acquire& request,
                          std::vector<UniqueFd> fds) {
  if (request.ticket() != nullptr) {
    if (const Status status = on_ticket(session, request_id, request); !status.is_ok())
      core_.server.reply_error(session.id, request_id, status);
    return;
  }
  auto pending = std::make_shared<Pending>();
  pending->id = next_id_++;
  pending->session = session.id;
  pending->request_id = request_id;
  if (const Status parsed = parse(*pending, session, request, fds); !parsed.is_ok())
    return core_.server.reply_error(session.id, request_id, parsed);
  pending_.emplace(pending->id, pending);
  if (request.model() != nullptr) return hash_tokens(pending);
  if (pending->token_count == 0) return resolve(pending);
  if (ingest_ == nullptr) {
    return fail(pending, {POLYKV_ERR_UNSUPPORTED,
                          "acquire: this polykvd reads no model files; pass the model's identity"});
  }
  ingest_->identify(session.uid, std::string(text_or_empty(request.model_name())),
                    request.has_model_fd() ? std::move(fds.front()) : UniqueFd(),
                    [this, id = pending->id](Result<ModelIdentity> identity) {
                      const PendingPtr found = find(id);
                      if (found == nullptr) return;
                      if (!identity) return fail(found, identity.status());
                      found->identity = std::move(*identity);
                      hash_tokens(found);
                    });
}

Status Acquires::charge_tokens(Pending& pending) const {
  const uint64_t count = pending.token_count;
  if (count > core_.limits.document_tokens_max) {
    return {POLYKV_ERR_LIMIT,
            format("acquire: the document has %llu tokens, at most %llu are allowed; raise "
                   "limits.document_tokens",
                   static_cast<unsigned long long>(count),
                   static_cast<unsigned long long>(core_.limits.document_tokens_max))};
  }
  const uint64_t bytes = count * sizeof(uint32_t);
  if (token_bytes_->load(std::memory_order_relaxed) + bytes > core_.limits.token_list_bytes_max) {
    return {POLYKV_ERR_LIMIT,
            format("acquire: token lists take their maximum of %llu bytes; wait until other "
                   "requests are answered, or raise polykvd's --budget",
                   static_cast<unsigned long long>(core_.limits.token_list_bytes_max))};
  }
  token_bytes_->fetch_add(bytes, std::memory_order_relaxed);
  pending.token_charge =
      std::shared_ptr<const void>(this, [total = token_bytes_, bytes](const void*) {
        total->fetch_sub(bytes, std::memory_order_relaxed);
      });
  return Status::ok();
}

void Acquires::hash_tokens(const PendingPtr& pending) {
  auto work = [fd = std::move(pending->token_fd), count = pending->token_count,
               maximum = core_.limits.document_tokens_max, identity = pending->identity,
               charge = std::move(pending->token_charge)] {
    return read_and_hash(fd->get(), count, maximum, identity, charge);
  };
  auto done = [this, id = pending->id](Result<HashedTokens> hashed) {
    const PendingPtr found = find(id);
    if (found == nullptr) return;  // cancelled, or its connection ended
    if (!hashed) return fail(found, hashed.status());
    found->selector.tokens = std::move(hashed->tokens);
    found->selector.digest = hashed->chain->back();
    found->root = hashed->root;
    found->chain = std::move(hashed->chain);
    resolve(found);
  };
  if (pending->token_count <= kInlineTokens) return done(work());
  core_.pool.submit<Result<HashedTokens>>(std::move(work), std::move(done));
}

// ---- the answer --------------------------------------------------------------------------------

void Acquires::resolve(const PendingPtr& pending) {
  for (const Domain domain : {pending->domain, kPublicDomain}) {
    if (const auto document = core_.catalog.find(domain, pending->selector)) {
      forget(*pending);
      return leases_.grant(pending->session, pending->request_id, document);
    }
  }
  for (const Domain domain : {pending->domain, kPublicDomain}) {
    if (const auto flight = publishing_.find(domain, pending->selector))
      return join(pending, *flight);
  }
  if (pending->selector.tokens == nullptr) return miss(pending);
  continue_prefix(pending);
}

void Acquires::join(const PendingPtr& pending, const Flight& flight) {
  if (!pending->stream) return park(pending, flight, 0);
  const Profile profile = flight.document->key.profile;
  if (!is_shareable(profile)) return fail(pending, one_segment_only(subject(*pending), profile));
  forget(*pending);
  leases_.grant(pending->session, pending->request_id, flight.document);
}

void Acquires::park(const PendingPtr& pending, const Flight& flight, uint64_t shared_tokens) {
  if (!pending->wait) {
    return fail(pending, {POLYKV_ERR_BUSY, subject(*pending) +
                                               ": somebody is producing it now; wait for it, or "
                                               "try again later"});
  }
  pending->waiting_on = flight.document->key;
  pending->waiting_tokens = shared_tokens;
  if (pending->selector.tokens != nullptr && shared_tokens == 0) {
    // They are equal; however many wait, the list and its chain are there once.
    pending->selector.tokens = flight.document->tokens;
    pending->chain = flight.document->chain;
  }
  if (pending->timer == 0 && pending->timeout_ms >= 0) {
    pending->timer = core_.loop.add_timer(pending->timeout_ms, [this, id = pending->id] {
      if (const PendingPtr late = find(id)) {
        fail(late, {POLYKV_ERR_TIMEOUT,
                    subject(*late) + format(": it was not complete within %lld ms; wait longer",
                                            static_cast<long long>(late->timeout_ms))});
      }
    });
  }
}

void Acquires::miss(const PendingPtr& pending) {
  if (pending->waiting_on && pending->waiting_tokens == 0) {
    return fail(pending, {POLYKV_ERR_PRODUCER_LOST,
                          subject(*pending) +
                              ": its producer died, stalled or gave up; produce it, or ask again"});
  }
  fail(pending, {POLYKV_ERR_NOT_FOUND, subject(*pending) +
                                           ": no such document that you may read; `polykvctl ls` "
                                           "lists them"});
}

std::string Acquires::subject(const Pending& pending) {
  return pending.selector.name.empty() ? "acquire" : "acquire '" + pending.selector.name + "'";
}

void Acquires::on_grown(const Document& document) {
  for (const PendingPtr& waiter : waiters_of(document.key)) {
    if (waiter->waiting_tokens > 0 && waiter->waiting_tokens <= document.end_token())
      resolve(waiter);
  }
}

void Acquires::on_sealed(const Document& document) {
  for (const PendingPtr& waiter : waiters_of(document.key)) resolve(waiter);
}

void Acquires::on_lost(const Document& document) {
  const std::vector<PendingPtr> waiters = waiters_of(document.key);
  // Those that may produce first: the others then go on waiting for the new producer.
  for (const bool may_produce : {true, false}) {
    for (const PendingPtr& waiter : waiters) {
      if (waiter->may_produce == may_produce) resolve(waiter);
    }
  }
}

// ---- bookkeeping -------------------------------------------------------------------------------

void Acquires::fail(const PendingPtr& pending, const Status& why) {
  forget(*pending);
  core_.server.reply_error(pending->session, pending->request_id, why);
}

void Acquires::forget(const Pending& pending) {
  core_.loop.cancel_timer(pending.timer);
  pending_.erase(pending.id);
}

Acquires::PendingPtr Acquires::find(uint64_t id) const {
  const auto found = pending_.find(id);
  return found == pending_.end() ? nullptr : found->second;
}

std::vector<Acquires::PendingPtr> Acquires::waiters_of(const DocumentKey& key) const {
  std::vector<PendingPtr> waiters;
  for (const auto& [id, pending] : pending_) {
    if (pending->waiting_on == key) waiters.push_back(pending);
  }
  return waiters;
}

bool Acquires::cancel(SessionId session, uint64_t request_id) {
  for (const auto& [id, pending] : pending_) {
    if (pending->session != session || pending->request_id != request_id) continue;
    fail(PendingPtr(pending), {POLYKV_ERR_CANCELLED, subject(*pending) + ": cancelled"});
    return true;
  }
  return false;
}

bool Acquires::is_pending(SessionId session, uint64_t request_id) const {
  return std::any_of(pending_.begin(), pending_.end(), [&](const auto& entry) {
    return entry.second->session == session && entry.second->request_id == request_id;
  });
}

size_t Acquires::pending_count(SessionId session) const {
  return static_cast<size_t>(
      std::count_if(pending_.begin(), pending_.end(),
                    [&](const auto& entry) { return entry.second->session == session; }));
}

void Acquires::on_session_end(const Session& session) {
  std::vector<PendingPtr> own;
  for (const auto& [id, pending] : pending_) {
    if (pending->session == session.id) own.push_back(pending);
  }
  for (const PendingPtr& pending : own) forget(*pending);
}

}  // namespace polykv::daemon
