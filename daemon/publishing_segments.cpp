// The segments of a ticket: reserve, commit, abort.

#include "daemon/document_wire.h"
#include "daemon/log.h"
#include "daemon/publishing.h"

namespace polykv::daemon {

namespace {

Status wrong(std::string why) {
  return {POLYKV_ERR_INVALID_ARGUMENT, "reserve a segment: " + std::move(why)};
}

/// Chain digests of a document that end in (first_token, first_token + token_count], and the one
/// that the segment continues.
void cut_chain(const Document& document, SegmentPromise& promise) {
  const uint64_t first = promise.spec.first_token;
  const uint64_t end = first + promise.spec.token_count;
  const uint64_t chunks_before = first / kChunkTokens;
  promise.parent = chunks_before == 0 ? document.root : (*document.chain)[chunks_before - 1];
  for (uint64_t i = chunks_before; i < document.chain->size(); ++i) {
    const uint64_t chunk_end = std::min((i + 1) * kChunkTokens, document.tokens->size());
    if (chunk_end > end) break;
    promise.digests.push_back((*document.chain)[i]);
  }
}

}  // namespace

std::shared_ptr<OpenSegment> Publishing::find_segment(const Session& session,
                                                      const wire::Handle* handle) const {
  std::shared_ptr<OpenSegment> open =
      handle == nullptr ? nullptr : open_segments_.find(from_wire(*handle));
  return open != nullptr && open->session == session.id ? open : nullptr;
}

// ---- reserve -----------------------------------------------------------------------------------

/// Copied, because the packet is gone once memory was measured.
Publishing::ReserveRequest Publishing::parse_reserve(const wire::SegmentReserve& wire) {
  ReserveRequest request;
  if (wire.ticket() != nullptr) request.ticket = from_wire(*wire.ticket());
  request.first_token = wire.first_token();
  request.token_count = wire.token_count();
  request.chosen_exact_rows = wire.chosen_exact_rows();
  request.has_certificate = wire.has_certificate();
  request.into_device = wire.into_device();
  if (wire.layer_profiles() != nullptr) {
    for (const uint8_t profile : *wire.layer_profiles())
      request.layer_profiles.push_back(static_cast<Profile>(profile));
  }
  return request;
}

Result<SegmentPromise> Publishing::promise(const Flight& flight,
                                           const ReserveRequest& request) const {
  const Document& document = *flight.document;
  const uint64_t document_tokens = document.tokens->size();
  if (flight.open_segment != nullptr)
    return wrong("the ticket has an open segment; commit or abort it first");
  if (request.first_token != flight.document->end_token() || request.token_count == 0 ||
      request.token_count > document_tokens - flight.document->end_token()) {
    return wrong(
        format("tokens %llu to %llu + %llu were asked for; the next segment begins at %llu "
               "and the document has %llu tokens",
               static_cast<unsigned long long>(request.first_token),
               static_cast<unsigned long long>(request.first_token),
               static_cast<unsigned long long>(request.token_count),
               static_cast<unsigned long long>(flight.document->end_token()),
               static_cast<unsigned long long>(document_tokens)));
  }
  if (is_single_segment(document.key.profile) && request.token_count != document_tokens) {
    return wrong(format("a document of profile %s is one segment; reserve all its %llu tokens",
                        profile_name(document.key.profile),
                        static_cast<unsigned long long>(document_tokens)));
  }
  SegmentPromise promise;
  promise.spec.identity = *document.identity;
  promise.spec.profile = document.key.profile;
  promise.spec.first_token = request.first_token;
  promise.spec.token_count = request.token_count;
  promise.spec.chosen_exact_rows = request.chosen_exact_rows;
  promise.spec.has_certificate = request.has_certificate;
  promise.spec.layer_profiles = request.layer_profiles;
  promise.into_device = request.into_device;
  promise.root = document.root;
  promise.document_tokens = document.tokens;
  cut_chain(document, promise);
  promise.spec.digest_count = static_cast<uint32_t>(promise.digests.size());
  if (promise.digests.size() > core_.limits.segment_digests_max) {
    return {POLYKV_ERR_LIMIT,
            format("reserve a segment: %llu tokens; at most %zu fit into one, use shorter segments",
                   static_cast<unsigned long long>(request.token_count),
                   core_.limits.segment_digests_max * kChunkTokens)};
  }
  if (request.into_device && !core_.backing.facts().is_cuda()) {
    return {POLYKV_ERR_UNSUPPORTED,
            "reserve a segment in device memory: this polykvd keeps documents in host memory; "
            "publish from host memory, or use a polykvd with --backing cuda"};
  }
  POLYKV_ASSIGN_OR_RETURN(const SegmentLayout layout, plan_segment(promise.spec));
  promise.size_bytes = layout.header.total_bytes;
  promise.data_offset = layout.header.data_offset;
  return promise;
}

Status Publishing::make_room(uint64_t needed_bytes, std::span<const MemoryHeadroom> headrooms) {
  AdmissionRequest request;
  request.needed_bytes = needed_bytes;
  request.segment_count = core_.segments.segment_count();
  request.segment_count_max = core_.limits.segment_count_max;
  request.budget_bytes = core_.limits.budget_bytes;
  request.charged_bytes = core_.segments.charged_bytes();
  request.retiring_bytes = core_.segments.retiring_bytes();
  request.unallocated_bytes = core_.segments.unallocated_bytes();
  request.reserve_bytes = core_.backing.reserve_bytes();
  request.headrooms = headrooms;
  const Room needed = shortage(request);
  if (needed.is_none()) return Status::ok();
  const Catalog::Evictions evictions = core_.catalog.choose_evictions(needed);
  if (!evictions.freed.covers(needed)) return refusal(request, evictions.freed);
  for (const auto& document : evictions.documents) {
    log_info("evicting a document of uid %u, %llu bytes", document->owner,
             static_cast<unsigned long long>(document->stored_bytes()));
    core_.catalog.retire(*document);
    ++core_.counters.evicted_documents_total;
  }
  return Status::ok();
}

void Publishing::on_reserve(Session& session, uint64_t request_id,
                            const wire::SegmentReserve& wire) {
  ReserveRequest request = parse_reserve(wire);
  const std::shared_ptr<Flight> flight = find_ticket(session, wire.ticket());
  if (flight == nullptr) {
    return core_.server.reply_error(session.id, request_id,
                                    tickets_.stale("reserve a segment", request.ticket));
  }
  const Result<SegmentPromise> promised = promise(*flight, request);
  if (!promised) return core_.server.reply_error(session.id, request_id, promised.status());
  core_.backing.measure(*promised,
                        [this, session = session.id, request_id, request = std::move(request)](
                            const Result<std::vector<MemoryHeadroom>>& headrooms) {
                          reserve(session, request_id, request, headrooms);
                        });
}

/// Once memory was measured; the ticket may have ended meanwhile, or been used for another segment.
void Publishing::reserve(SessionId session_id, uint64_t request_id, const ReserveRequest& request,
                         const Result<std::vector<MemoryHeadroom>>& headrooms) {
  const Session* session = core_.server.find(session_id);
  if (session == nullptr || session->process->is_gone) return;
  const std::shared_ptr<Flight> flight = tickets_.find(request.ticket);
  if (flight == nullptr) {
    return core_.server.reply_error(session_id, request_id,
                                    tickets_.stale("reserve a segment", request.ticket));
  }
  Result<SegmentPromise> promised = promise(*flight, request);
  if (!promised) return core_.server.reply_error(session_id, request_id, promised.status());
  const uint64_t charged_bytes = core_.backing.charged_bytes(*promised);
  const Status admitted = headrooms ? make_room(charged_bytes, *headrooms) : headrooms.status();
  if (!admitted.is_ok()) return core_.server.reply_error(session_id, request_id, admitted);

  auto open = std::make_shared<OpenSegment>();
  open->session = session_id;
  open->process = session->process;
  open->segment = core_.segments.reserve(request.first_token, request.token_count,
                                         promised->size_bytes, charged_bytes);
  open->flight = flight;
  open->promise = std::make_shared<const SegmentPromise>(std::move(*promised));
  open->handle = open_segments_.insert(open);
  flight->open_segment = open;
  segments_of_session_[session_id].insert(open);
  core_.backing.allocate(open->promise, [this, session_id, handle = open->handle,
                                         request_id](Result<SegmentMemory> memory) {
    on_allocated(session_id, handle, request_id, std::move(memory));
  });
}

void Publishing::on_allocated(SessionId session, const Handle& handle, uint64_t request_id,
                              Result<SegmentMemory> memory) {
  const std::shared_ptr<OpenSegment> open = open_segments_.find(handle);
  if (open == nullptr) {  // its ticket, or its connection, ended: the memory goes here
    return core_.server.reply_error(session, request_id,
                                    open_segments_.stale("reserve a segment", handle));
  }
  if (!memory) {
    reclaim(*open);
    return core_.server.reply_error(session, request_id, memory.status());
  }
  core_.segments.fill(*open->segment, std::move(memory->writable), std::move(memory->device));
  core_.segments.hold(*open->process, open->segment);
  reply_reserved(*open, request_id);
}

void Publishing::reply_reserved(const OpenSegment& open, uint64_t request_id) {
  std::vector<wire::Digest> digests;
  for (const Digest& digest : open.promise->digests) digests.push_back(to_wire(digest));
  flatbuffers::FlatBufferBuilder builder;
  const wire::Handle handle = to_wire(open.handle);
  const wire::Digest root = to_wire(open.promise->root);
  const wire::Digest parent = to_wire(open.promise->parent);
  wire::DeviceMemory device;
  const bool into_device = open.promise->into_device;
  if (into_device) device = to_wire(*open.segment->device, core_.epoch);
  const auto body =
      wire::CreateSegmentReservedDirect(builder, &handle, open.promise->size_bytes, &root, &parent,
                                        &digests, into_device ? &device : nullptr);
  send_packet(core_.server, open.session, builder, request_id, body, {open.segment->writable});
}

// ---- commit ------------------------------------------------------------------------------------

void Publishing::on_commit(Session& session, uint64_t request_id,
                           const wire::SegmentCommit& request) {
  const std::shared_ptr<OpenSegment> open = find_segment(session, request.segment());
  if (open == nullptr || open->segment->state != SegmentState::filling) {
    if (open != nullptr) let_go(*open);
    return core_.server.reply_error(
        session.id, request_id,
        open_segments_.stale("commit a segment",
                             request.segment() ? from_wire(*request.segment()) : Handle{}));
  }
  if (open->is_committing) {
    return core_.server.reply_error(
        session.id, request_id,
        {POLYKV_ERR_INVALID_ARGUMENT, "commit a segment: it is being committed already"});
  }
  open->is_committing = true;
  core_.loop.cancel_timer(open->flight.lock()->stall_timer);
  core_.backing.seal({open->segment->writable, open->segment->device}, open->promise,
                     [this, session = session.id, handle = open->handle,
                      request_id](Result<SealedSegment> sealed) {
                       on_verified(session, handle, request_id, std::move(sealed));
                     });
}

void Publishing::on_verified(SessionId session, const Handle& handle, uint64_t request_id,
                             Result<SealedSegment> sealed) {
  const std::shared_ptr<OpenSegment> open = open_segments_.find(handle);
  const std::shared_ptr<Flight> flight = open == nullptr ? nullptr : open->flight.lock();
  if (open != nullptr) open->is_committing = false;
  if (flight == nullptr) {  // the ticket, or the connection, ended meanwhile
    if (open != nullptr) let_go(*open);
    return core_.server.reply_error(session, request_id,
                                    open_segments_.stale("commit a segment", handle));
  }
  renew(flight);
  if (sealed) return accept_segment(*open, request_id, std::move(*sealed));
  if (sealed.status().code() != POLYKV_ERR_BUSY) {
    reclaim(*open);
    let_go(*open);
  }
  core_.server.reply_error(session, request_id, sealed.status());
}

void Publishing::accept_segment(OpenSegment& open, uint64_t request_id, SealedSegment sealed) {
  const std::shared_ptr<Flight> flight = open.flight.lock();
  core_.segments.seal(*open.segment, std::move(sealed.readable));
  open.segment->prefix = sealed.prefix;
  open.segment->layers = std::move(sealed.layers);
  core_.segments.release(*open.process, *open.segment);
  core_.catalog.append(*flight->document, open.segment, open.promise->digests,
                       is_shareable(flight->document->key.profile));
  flight->open_segment = nullptr;
  core_.counters.tokens_committed_total += open.segment->token_count;
  close_segment(open);
  core_.server.reply_done(flight->session, request_id);
  const std::shared_ptr<Document> document = flight->document;
  const bool is_complete = document->end_token() == document->tokens->size();
  if (is_complete) complete(flight);
  events_.on_grown(document);
  if (is_complete) events_.on_sealed(document);
}

void Publishing::on_segment_abort(Session& session, uint64_t request_id,
                                  const wire::SegmentAbort& request) {
  const std::shared_ptr<OpenSegment> open = find_segment(session, request.segment());
  if (open == nullptr) {
    return core_.server.reply_error(
        session.id, request_id,
        open_segments_.stale("abort a segment",
                             request.segment() ? from_wire(*request.segment()) : Handle{}));
  }
  if (open->is_committing) {
    return core_.server.reply_error(
        session.id, request_id,
        {POLYKV_ERR_INVALID_ARGUMENT, "abort a segment: it is being committed"});
  }
  reclaim(*open);
  let_go(*open);
  core_.server.reply_done(session.id, request_id);
}

}  // namespace polykv::daemon
