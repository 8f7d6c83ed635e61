// Acquire: what of a token list is sealed already, who else is about to seal more of it, and who
// produces the rest.
#include <algorithm>
#include <chrono>

#include "daemon/acquires.h"
#include "kernels/codec.h"

namespace polykv::daemon {

namespace {

int64_t unix_now_ms() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

}  // namespace

Status Acquires::one_segment_only(const std::string& operation, Profile profile) {
  return {POLYKV_ERR_UNSUPPORTED,
          operation + ": a document of profile " + profile_name(profile) +
              " is one segment, so it cannot be extended, share a prefix or be read before it is "
              "complete; use another profile"};
}

// ---- prefixes ----------------------------------------------------------------------------------

/// Neither the document nor a flight of it is there.
void Acquires::continue_prefix(const PendingPtr& pending) {
  std::vector<SegmentPart> parts = longest_prefix(*pending);
  if (pending->extends) {
    Result<std::vector<SegmentPart>> base = base_parts(*pending);
    if (!base) return fail(pending, base.status());
    if (end_of(*base) > end_of(parts)) parts = std::move(*base);
  }
  if (end_of(parts) == pending->token_count) return grant_covered(pending, std::move(parts));
  if (!pending->may_produce) return miss(pending);
  if (wait_for_prefix(pending, end_of(parts))) return;
  produce(pending, std::move(parts));
}

/// Whose profile is `any`, and does not produce, gets the first that holds all of the tokens.
std::vector<SegmentPart> Acquires::longest_prefix(Pending& pending) const {
  std::vector<SegmentPart> best;
  const TokenChain chain{*pending.selector.tokens, *pending.chain};
  const Profile asked = pending.selector.profile;
  for (const Profile profile : shareable_profiles()) {
    if (asked != Profile::any && asked != profile) continue;
    for (const Domain domain : {pending.domain, kPublicDomain}) {
      std::vector<SegmentPart> parts =
          core_.catalog.prefixes().longest(domain, profile, pending.root, chain);
      if (end_of(parts) > end_of(best)) best = std::move(parts);
    }
  }
  if (end_of(best) == pending.token_count) pending.selector.profile = best.back().segment->profile;
  return best;
}

/// All of the document that the tokens are said to extend.
Result<std::vector<SegmentPart>> Acquires::base_parts(const Pending& pending) const {
  Selector selector;
  selector.digest = *pending.extends;
  selector.profile = pending.selector.profile;
  std::shared_ptr<Document> base;
  for (const Domain domain : {pending.domain, kPublicDomain}) {
    if (base == nullptr) base = core_.catalog.find(domain, selector);
  }
  if (base == nullptr) {
    return {POLYKV_ERR_NOT_FOUND,
            std::string("extend: the document to extend is not there in profile ") +
                profile_name(selector.profile) + "; `polykvctl ls` lists what is"};
  }
  if (!is_shareable(base->key.profile)) return one_segment_only("extend", base->key.profile);
  if (base->root != pending.root)
    return Status(POLYKV_ERR_INVALID_ARGUMENT,
                  "extend: the document is of another model; extend it with its own");
  const auto& tokens = *pending.selector.tokens;
  if (base->tokens->size() > tokens.size() ||
      !std::equal(base->tokens->begin(), base->tokens->end(), tokens.begin())) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "extend: the tokens do not begin with those of the document that they are to extend"};
  }
  return base->parts;
}

/// True: somebody is about to seal a longer prefix, and the request waits for that.
bool Acquires::wait_for_prefix(const PendingPtr& pending, uint64_t token_count) {
  if (!pending->wait || !is_shareable(pending->selector.profile)) return false;
  // Who produces something itself might be the one to wait for.
  if (publishing_.produces(pending->session)) return false;
  Publishing::SharedFlight longest;
  for (const Domain domain : {pending->domain, kPublicDomain}) {
    const auto shared = publishing_.find_shared(domain, pending->selector.profile, *pending->chain);
    if (shared.token_count > longest.token_count) longest = shared;
  }
  if (longest.token_count <= token_count) return false;
  park(pending, *longest.flight, longest.token_count);
  return true;
}

// ---- producing ---------------------------------------------------------------------------------

std::shared_ptr<Document> Acquires::new_document(const Pending& pending) {
  auto document = std::make_shared<Document>();
  document->serial = core_.catalog.next_serial();
  document->key = {pending.domain, pending.selector.digest, pending.selector.profile};
  document->owner = pending.owner;
  document->identity = core_.catalog.share_identity(pending.root, pending.identity);
  document->root = pending.root;
  document->tokens = pending.selector.tokens;
  document->chain = pending.chain;
  document->created_unix_ms = unix_now_ms();
  return document;
}

/// Sealed segments hold all of the tokens: for a producer they are a document from now on, for a
/// reader as long as the lease.
void Acquires::grant_covered(const PendingPtr& pending, std::vector<SegmentPart> parts) {
  const std::shared_ptr<Document> document = new_document(*pending);
  if (!pending->may_produce) {
    forget(*pending);
    Catalog::make_view(*document, std::move(parts));
    return leases_.grant(pending->session, pending->request_id, document);
  }
  const std::string& name = pending->publish_name;
  if (!name.empty()) {
    const Status free = publishing_.check_name_free(document->key, name, pending->replace_name);
    if (!free.is_ok()) return fail(pending, free);
  }
  forget(*pending);
  if (const auto unfinished = core_.catalog.take_incomplete(document->key)) {
    core_.catalog.drop(*unfinished);
    leases_.on_stalled(*unfinished);
  }
  Catalog::start_with(*document, std::move(parts));
  core_.catalog.add(document);
  if (!name.empty()) {
    [[maybe_unused]] const Status named = core_.catalog.give_name(
        *document, name, pending->replace_name, core_.limits.names_per_document);
    assert(named.is_ok() && "it was free, and a new document has no other name");
  }
  leases_.grant(pending->session, pending->request_id, document);
}

void Acquires::produce(const PendingPtr& pending, std::vector<SegmentPart> parts) {
  forget(*pending);
  const DocumentKey key{pending->domain, pending->selector.digest, pending->selector.profile};
  // Whoever was producing it before may have left more than others share with it.
  std::shared_ptr<Document> document = core_.catalog.take_incomplete(key);
  if (document != nullptr && document->end_token() < end_of(parts)) {
    core_.catalog.drop(*document);
    leases_.on_stalled(*document);
    document = nullptr;
  }
  if (document == nullptr) {
    document = new_document(*pending);
    Catalog::start_with(*document, std::move(parts));
  }
  document->owner = pending->owner;
  document->names.clear();
  if (!pending->publish_name.empty()) document->names.insert(pending->publish_name);
  publishing_.grant(pending->session, pending->request_id, std::move(document),
                    pending->replace_name);
}

/// What is sealed of the document that the session produces.
Status Acquires::on_ticket(const Session& session, uint64_t request_id,
                           const wire::Acquire& request) {
  const auto flight = publishing_.find_ticket(session, request.ticket());
  if (flight == nullptr)
    return {POLYKV_ERR_STALE, "acquire: the ticket has ended or is not of this connection"};
  const Document& whole = *flight->document;
  const uint64_t end = whole.end_token();
  if (end == 0) return {POLYKV_ERR_NOT_FOUND, "acquire: nothing of the document is sealed yet"};
  // However many leases are asked for, the tokens are copied once.
  if (const auto view = flight->sealed_view.lock(); view != nullptr && view->end_token() == end) {
    leases_.grant(session.id, request_id, view);
    return Status::ok();
  }
  auto document = std::make_shared<Document>();
  document->key = whole.key;
  document->owner = whole.owner;
  document->identity = whole.identity;
  document->root = whole.root;
  document->created_unix_ms = whole.created_unix_ms;
  const auto first = whole.tokens->begin();
  document->tokens = std::make_shared<const std::vector<uint32_t>>(
      first, first + static_cast<std::ptrdiff_t>(end));
  std::vector<Digest> chain(whole.chain->begin(),
                            whole.chain->begin() + static_cast<std::ptrdiff_t>(end / kChunkTokens));
  if (const uint64_t tail = end % kChunkTokens; tail > 0) {
    const Digest& parent = chain.empty() ? whole.root : chain.back();
    chain.push_back(chain_next(parent, std::span(*document->tokens).last(tail)));
  }
  document->key.digest = chain.back();
  document->chain = std::make_shared<const std::vector<Digest>>(std::move(chain));
  Catalog::make_view(*document, whole.parts);
  flight->sealed_view = document;
  leases_.grant(session.id, request_id, document);
  return Status::ok();
}

}  // namespace polykv::daemon
