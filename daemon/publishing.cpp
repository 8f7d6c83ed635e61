#include "daemon/publishing.h"

#include <algorithm>

#include "daemon/log.h"

namespace polykv::daemon {

Publishing::Publishing(Core& core, Events events)
    : core_(core),
      events_(std::move(events)),
      tickets_(HandleKind::ticket, core.epoch),
      open_segments_(HandleKind::segment, core.epoch) {}

// ---- tickets -----------------------------------------------------------------------------------

Status Publishing::check_document(const Document& document, bool replace_name,
                                  SessionId session) const {
  POLYKV_RETURN_IF_ERROR(check_profile(document.key.profile, document.identity->layers));
  const auto ticket_count =
      static_cast<size_t>(std::count_if(flights_.begin(), flights_.end(), [&](const auto& entry) {
        return entry.second->session == session;
      }));
  if (ticket_count >= core_.limits.tickets_per_session) {
    return {POLYKV_ERR_LIMIT, format("acquire: this connection produces its maximum of %zu "
                                     "documents; finish some",
                                     core_.limits.tickets_per_session)};
  }
  for (const std::string& name : document.names)
    POLYKV_RETURN_IF_ERROR(check_name_free(document.key, name, replace_name));
  return Status::ok();
}

Status Publishing::check_name_free(const DocumentKey& key, const std::string& name,
                                   bool replace) const {
  for (const auto& [other, flight] : flights_) {
    if (other.domain == key.domain && !replace && flight->document->names.contains(name)) {
      return {POLYKV_ERR_ALREADY_EXISTS,
              "acquire: name '" + name +
                  "' is promised to a document that is being produced; choose another name"};
    }
  }
  return core_.catalog.check_name_free(key.domain, name, replace, key).with_context("acquire");
}

void Publishing::grant(SessionId session, uint64_t request_id, std::shared_ptr<Document> document,
                       bool replace_name) {
  if (const Status status = check_document(*document, replace_name, session); !status.is_ok()) {
    give_up(document);
    return core_.server.reply_error(session, request_id, status);
  }
  auto flight = std::make_shared<Flight>();
  flight->session = session;
  flight->document = std::move(document);
  flight->replace_name = replace_name;
  flight->ticket = tickets_.insert(flight);
  [[maybe_unused]] const bool is_new = flights_.emplace(flight->document->key, flight).second;
  assert(is_new && "one flight a document");
  renew(flight);

  flatbuffers::FlatBufferBuilder builder;
  const auto model = to_wire(builder, *flight->document->identity);
  const wire::Handle ticket = to_wire(flight->ticket);
  send_packet(core_.server, session, builder, request_id,
              wire::CreateTicketGranted(builder, &ticket, model, flight->document->tokens->size(),
                                        flight->document->end_token()));
}

std::shared_ptr<Flight> Publishing::find(Domain domain, const Selector& selector) const {
  for (const auto& [key, flight] : flights_) {
    if (key.domain == domain && selector.matches(*flight->document)) return flight;
  }
  return nullptr;
}

Publishing::SharedFlight Publishing::find_shared(Domain domain, Profile profile,
                                                 const std::vector<Digest>& chain) const {
  SharedFlight best;
  for (const auto& [key, flight] : flights_) {
    if (key.domain != domain || key.profile != profile) continue;
    // Equal up to a point, and different from there on.
    const std::vector<Digest>& other = *flight->document->chain;
    size_t same = 0;
    size_t end = std::min(chain.size(), other.size());
    while (same < end) {
      const size_t middle = same + (end - same + 1) / 2;
      if (chain[middle - 1] == other[middle - 1]) {
        same = middle;
      } else {
        end = middle - 1;
      }
    }
    // The last digest of a document may be that of a tail.
    const uint64_t tokens = std::min<uint64_t>(
        same * kChunkTokens, flight->document->tokens->size() / kChunkTokens * kChunkTokens);
    if (tokens > best.token_count) best = {flight, tokens};
  }
  return best;
}

bool Publishing::produces(SessionId session) const {
  return std::any_of(flights_.begin(), flights_.end(),
                     [&](const auto& entry) { return entry.second->session == session; });
}

std::shared_ptr<Flight> Publishing::find_ticket(const Session& session,
                                                const wire::Handle* handle) const {
  std::shared_ptr<Flight> flight = handle == nullptr ? nullptr : tickets_.find(from_wire(*handle));
  return flight != nullptr && flight->session == session.id ? flight : nullptr;
}

void Publishing::renew(const std::shared_ptr<Flight>& flight) {
  core_.loop.cancel_timer(flight->stall_timer);
  flight->stall_timer = core_.loop.add_timer(core_.limits.stall_deadline_ms,
                                             [this, weak = std::weak_ptr<Flight>(flight)] {
                                               if (const auto stalled = weak.lock())
                                                 lose(stalled, "its producer stalled");
                                             });
}

void Publishing::on_progress(Session& session, uint64_t request_id,
                             const wire::TicketProgress& request) {
  const std::shared_ptr<Flight> flight = find_ticket(session, request.ticket());
  if (flight == nullptr) {
    return core_.server.reply_error(
        session.id, request_id,
        tickets_.stale("progress", request.ticket() ? from_wire(*request.ticket()) : Handle{}));
  }
  // While a commit is being verified, the daemon is the one to wait for.
  if (flight->open_segment == nullptr || !flight->open_segment->is_committing) renew(flight);
  core_.server.reply_done(session.id, request_id);
}

void Publishing::on_ticket_abort(Session& session, uint64_t request_id,
                                 const wire::TicketAbort& request) {
  const std::shared_ptr<Flight> flight = find_ticket(session, request.ticket());
  if (flight == nullptr) {
    return core_.server.reply_error(
        session.id, request_id,
        tickets_.stale("give up", request.ticket() ? from_wire(*request.ticket()) : Handle{}));
  }
  const std::shared_ptr<OpenSegment> open = flight->open_segment;
  lose(flight, "its producer gave up");
  if (open != nullptr) let_go(*open);
  core_.server.reply_done(session.id, request_id);
}

void Publishing::end_flight(Flight& flight) {
  core_.loop.cancel_timer(flight.stall_timer);
  tickets_.erase(flight.ticket);
  flights_.erase(flight.document->key);
}

void Publishing::lose(const std::shared_ptr<Flight>& flight, const char* why) {
  log_info("uid %u: a document of %zu tokens is not completed: %s", flight->document->owner,
           flight->document->tokens->size(), why);
  end_flight(*flight);
  if (flight->open_segment != nullptr) reclaim(*flight->open_segment);
  give_up(flight->document);
  events_.on_lost(flight->document);
}

/// What was sealed for it stays, for whoever goes on.
void Publishing::give_up(const std::shared_ptr<Document>& document) {
  if (document->end_token() > document->prefix_tokens) {
    core_.catalog.keep_incomplete(document);
  } else {
    core_.catalog.drop(*document);
  }
}

void Publishing::complete(const std::shared_ptr<Flight>& flight) {
  end_flight(*flight);
  const std::shared_ptr<Document> document = flight->document;
  const std::set<std::string> names = std::move(document->names);
  document->names.clear();
  core_.catalog.add(document);
  for (const std::string& name : names) {
    const Status named = core_.catalog.give_name(*document, name, flight->replace_name,
                                                 core_.limits.names_per_document);
    if (!named.is_ok())
      log_warning("a sealed document stays without its name: %s", named.message().c_str());
  }
}

// ---- ending ------------------------------------------------------------------------------------

void Publishing::on_session_end(const Session& session) {
  std::vector<std::shared_ptr<Flight>> own;
  for (const auto& [key, flight] : flights_) {
    if (flight->session == session.id) own.push_back(flight);
  }
  for (const auto& flight : own) lose(flight, "its producer's connection ended");
  // What its process may still write to stays charged to it until it is gone.
  const auto found = segments_of_session_.find(session.id);
  if (found == segments_of_session_.end()) return;
  const auto open_segments = found->second;
  for (const auto& open : open_segments) close_segment(*open);
}

/// The segment cannot be committed any more.
void Publishing::reclaim(OpenSegment& open) {
  if (const auto flight = open.flight.lock()) flight->open_segment = nullptr;
  open.flight.reset();
  if (open.segment->state < SegmentState::sealed) core_.segments.retire(*open.segment);
  if (open.segment->state == SegmentState::gone) close_segment(open);
}

/// The producer says that it has unmapped a reclaimed segment: believed when nothing can write to
/// it any more.
void Publishing::let_go(OpenSegment& open) {
  if (open.segment->writable == nullptr || !seal_against_writing(open.segment->writable->get()))
    return;
  core_.segments.release(*open.process, *open.segment);
  close_segment(open);
}

/// Its handle ends.
void Publishing::close_segment(OpenSegment& open) {
  if (open_segments_.find(open.handle) == nullptr) return;
  const std::shared_ptr<OpenSegment> keep = open_segments_.find(open.handle);
  open_segments_.erase(open.handle);
  const auto found = segments_of_session_.find(open.session);
  found->second.erase(keep);
  if (found->second.empty()) segments_of_session_.erase(found);
}

}  // namespace polykv::daemon
