#include "daemon/requests.h"

#include <unistd.h>

#include "daemon/document_wire.h"

namespace polykv::daemon {

Requests::Requests(Core& core, std::string version)
    : core_(core),
      version_(std::move(version)),
      started_ms_(EventLoop::now_ms()),
      leases_(core),
      publishing_(core, {[this](const auto& document) { on_grown(document); },
                         [this](const auto& document) { acquires_.on_sealed(*document); },
                         [this](const auto& document) { on_lost(document); }}),
      acquires_(core, leases_, publishing_) {}

void Requests::on_grown(const std::shared_ptr<Document>& document) {
  leases_.on_grown(*document);
  acquires_.on_grown(*document);
}

void Requests::on_lost(const std::shared_ptr<Document>& document) {
  acquires_.on_lost(*document);
  // Unless one of those that waited goes on with it.
  if (document->state != DocumentState::filling) leases_.on_stalled(*document);
}

void Requests::set_ingest(IngestService* ingest) {
  ingest_ = ingest;
  acquires_.set_ingest(ingest);
}

void Requests::on_session_ready(Session& session) {
  if (session.kind == SessionKind::worker && ingest_ != nullptr) ingest_->on_worker_ready(session);
}

void Requests::on_packet(Session& session, const wire::Packet& packet, std::vector<UniqueFd> fds) {
  const uint64_t id = packet.request_id();
  if (is_pending(session.id, id)) {
    return core_.server.drop(
        session.id, {POLYKV_ERR_PROTOCOL, "read a packet: its request id is in use; number anew"});
  }
  const bool may_wait =
      packet.body_type() == wire::Body::Acquire || packet.body_type() == wire::Body::Ingest;
  if (may_wait && pending_count(session.id) >= core_.limits.pending_requests_per_session) {
    return core_.server.reply_error(
        session.id, id,
        {POLYKV_ERR_LIMIT, format("this connection has its maximum of %zu waiting requests; wait "
                                  "for some",
                                  core_.limits.pending_requests_per_session)});
  }
  if (may_wait) {
    const auto* ingest = packet.body_as_Ingest();
    const Status allowed =
        core_.backing.check_user(session.uid, ingest != nullptr && ingest->share_public());
    if (!allowed.is_ok()) return core_.server.reply_error(session.id, id, allowed);
  }
  switch (packet.body_type()) {
    case wire::Body::Acquire:
      return acquires_.on_acquire(session, id, *packet.body_as_Acquire(), std::move(fds));
    case wire::Body::SegmentAck:
      return leases_.on_ack(session, *packet.body_as_SegmentAck());
    case wire::Body::Release:
      return leases_.on_release(session, id, *packet.body_as_Release());
    case wire::Body::SegmentReserve:
      return publishing_.on_reserve(session, id, *packet.body_as_SegmentReserve());
    case wire::Body::SegmentCommit:
      return publishing_.on_commit(session, id, *packet.body_as_SegmentCommit());
    case wire::Body::SegmentAbort:
      return publishing_.on_segment_abort(session, id, *packet.body_as_SegmentAbort());
    case wire::Body::TicketProgress:
      return publishing_.on_progress(session, id, *packet.body_as_TicketProgress());
    case wire::Body::TicketAbort:
      return publishing_.on_ticket_abort(session, id, *packet.body_as_TicketAbort());
    case wire::Body::Ingest:
      if (ingest_ == nullptr) {
        return core_.server.reply_error(
            session.id, id,
            {POLYKV_ERR_UNSUPPORTED, "ingest: this polykvd was built without it; publish instead"});
      }
      return ingest_->on_ingest(session, id, *packet.body_as_Ingest(), std::move(fds));
    case wire::Body::Cancel:
      return on_cancel(session, id, *packet.body_as_Cancel());
    case wire::Body::List:
      return on_list(session, id, *packet.body_as_List());
    case wire::Body::Remove:
      return on_remove(session, id, *packet.body_as_Remove());
    case wire::Body::GetStatus:
      return on_status(session, id);
    default:
      if (ingest_ != nullptr) ingest_->on_worker_packet(session, packet);
  }
}

bool Requests::is_pending(SessionId session, uint64_t request_id) const {
  return acquires_.is_pending(session, request_id) ||
         (ingest_ != nullptr && ingest_->is_pending(session, request_id));
}

size_t Requests::pending_count(SessionId session) const {
  return acquires_.pending_count(session) +
         (ingest_ == nullptr ? 0 : ingest_->pending_count(session));
}

void Requests::on_session_end(Session& session) {
  // Its own waiting requests first: they must not inherit the tickets that it loses next.
  acquires_.on_session_end(session);
  publishing_.on_session_end(session);
  leases_.on_session_end(session);
  if (ingest_ != nullptr) ingest_->on_session_end(session);
}

void Requests::on_cancel(Session& session, uint64_t request_id, const wire::Cancel& request) {
  // Answered already, or never made: nothing to do, and no error, since replies may cross.
  if (!acquires_.cancel(session.id, request.target_request_id()) && ingest_ != nullptr)
    (void)ingest_->cancel(session.id, request.target_request_id());
  core_.server.reply_done(session.id, request_id);
}

void Requests::on_list(Session& session, uint64_t request_id, const wire::List& request) {
  flatbuffers::FlatBufferBuilder builder;
  std::vector<flatbuffers::Offset<wire::DocumentInfo>> page;
  uint64_t last_serial = 0;
  uint64_t next_cursor = 0;
  const size_t count = core_.limits.list_page_documents;
  for (const auto& document : core_.catalog.list(session.uid, request.cursor(), count + 1)) {
    if (page.size() >= count || builder.GetSize() > core_.limits.list_page_bytes) {
      next_cursor = last_serial;
      break;
    }
    page.push_back(document_info(builder, *document, core_.backing.facts().name));
    last_serial = document->serial;
  }
  send_packet(core_.server, session.id, builder, request_id,
              wire::CreateListingDirect(builder, &page, next_cursor));
}

Status Requests::remove(const Session& session, const wire::Remove& request) {
  const bool by_name = request.name() != nullptr && request.name()->size() > 0;
  if (by_name == (request.digest() != nullptr))
    return {POLYKV_ERR_INVALID_ARGUMENT, "remove: give either a name or a digest"};
  const std::string name(text_or_empty(request.name()));
  if (by_name) POLYKV_RETURN_IF_ERROR(check_name(name).with_context("remove"));
  for (const Domain domain : {Domain{session.uid}, kPublicDomain}) {
    std::vector<std::shared_ptr<Document>> found;
    Selector selector;
    if (by_name) {
      selector.name = name;
      if (const auto document = core_.catalog.find(domain, selector)) found.push_back(document);
    } else {
      selector.digest = from_wire(*request.digest());
      found = core_.catalog.find_all(domain, selector.digest);
    }
    if (const auto document = core_.catalog.find_incomplete(domain, selector))
      found.push_back(document);
    bool is_foreign = false;
    for (const auto& document : found) {
      if (domain == kPublicDomain && session.uid != 0 && session.uid != document->owner) {
        is_foreign = true;
      } else if (by_name && document->state == DocumentState::sealed) {
        core_.catalog.take_name(*document, name);
      } else {
        core_.catalog.retire(*document);
        leases_.on_stalled(*document);  // of one that was incomplete
      }
    }
    if (is_foreign) {
      return {POLYKV_ERR_PERMISSION,
              "remove: the public document belongs to another user; ask them, or root"};
    }
    if (!found.empty()) return Status::ok();
  }
  return {POLYKV_ERR_NOT_FOUND, (by_name ? "remove '" + name + "'" : std::string("remove")) +
                                    ": no such document of yours; `polykvctl ls` lists them"};
}

void Requests::on_remove(Session& session, uint64_t request_id, const wire::Remove& request) {
  const Status removed = remove(session, request);
  if (!removed.is_ok()) return core_.server.reply_error(session.id, request_id, removed);
  core_.server.reply_done(session.id, request_id);
}

void Requests::on_status(Session& session, uint64_t request_id) {
  flatbuffers::FlatBufferBuilder builder;
  const auto version = builder.CreateString(version_);
  const BackingFacts& backing = core_.backing.facts();
  const auto backing_name = builder.CreateString(backing.name);
  const auto backing_note = builder.CreateString(backing.note);
  const auto device_name = builder.CreateString(backing.device.name);
  const auto device_uuid =
      builder.CreateString(backing.is_cuda() ? device::uuid_text(backing.device.uuid) : "");
  wire::StatusReplyBuilder reply(builder);
  reply.add_epoch(core_.epoch);
  reply.add_version(version);
  reply.add_pid(::getpid());
  reply.add_uptime_ms(EventLoop::now_ms() - started_ms_);
  reply.add_budget_bytes(core_.limits.budget_bytes);
  reply.add_stored_bytes(core_.segments.stored_bytes());
  reply.add_retiring_bytes(core_.segments.retiring_bytes());
  reply.add_document_count(core_.catalog.document_count());
  reply.add_segment_count(core_.segments.segment_count());
  reply.add_lease_count(leases_.lease_count());
  reply.add_session_count(core_.server.session_count());
  reply.add_worker_count(ingest_ == nullptr ? 0 : ingest_->worker_count());
  reply.add_tokens_prefilled_total(core_.counters.tokens_prefilled_total);
  reply.add_tokens_committed_total(core_.counters.tokens_committed_total);
  reply.add_evicted_documents_total(core_.counters.evicted_documents_total);
  reply.add_fingerprint_cache_hits_total(core_.counters.fingerprint_cache_hits_total);
  reply.add_fingerprint_cache_misses_total(core_.counters.fingerprint_cache_misses_total);
  reply.add_backing(backing_name);
  reply.add_backing_note(backing_note);
  reply.add_device_name(device_name);
  reply.add_device_uuid(device_uuid);
  reply.add_device_total_bytes(backing.device.total_bytes);
  reply.add_device_free_bytes(backing.free_bytes);
  reply.add_device_reserve_bytes(backing.reserve_bytes);
  reply.add_device_driver(static_cast<uint32_t>(backing.versions.driver));
  reply.add_device_runtime(static_cast<uint32_t>(backing.versions.runtime));
  send_packet(core_.server, session.id, builder, request_id, reply.Finish());
}

}  // namespace polykv::daemon
