#include "daemon/leases.h"

#include <algorithm>
#include <utility>

#include "daemon/document_wire.h"

namespace polykv::daemon {

void Leases::grant(SessionId session_id, uint64_t request_id,
                   const std::shared_ptr<Document>& document) {
  const auto end_view = [&] {
    core_.catalog.lease(*document);
    core_.catalog.end_lease(*document);
  };
  Session* session = core_.server.find(session_id);
  if (session == nullptr || session->process->is_gone) return end_view();
  std::vector<Handle>& own = of_session_[session_id];
  if (own.size() >= core_.limits.leases_per_session) {
    end_view();
    return core_.server.reply_error(
        session_id, request_id,
        {POLYKV_ERR_LIMIT, format("acquire: this connection has its maximum of %zu leases; release "
                                  "some",
                                  core_.limits.leases_per_session)});
  }
  constexpr uint32_t kDeviceMemoryVersion = 2;
  if (core_.backing.facts().is_cuda() && session->protocol_version < kDeviceMemoryVersion) {
    end_view();
    return core_.server.reply_error(
        session_id, request_id,
        {POLYKV_ERR_VERSION, format("acquire: the document is in device memory, which protocol "
                                    "version %u knows of and yours, %u, does not; update libpolykv",
                                    kDeviceMemoryVersion, session->protocol_version)});
  }
  auto lease = std::make_shared<Lease>();
  lease->session = session_id;
  lease->request_id = request_id;
  lease->process = session->process;
  lease->document = document;
  core_.catalog.lease(*document);
  hold_segments(*lease);
  const Handle handle = table_.insert(lease);
  own.push_back(handle);
  if (document->state == DocumentState::filling) growing_[document.get()].push_back(handle);

  flatbuffers::FlatBufferBuilder builder;
  const auto info = document_info(builder, *document, core_.backing.facts().name);
  const wire::Handle wire_handle = to_wire(handle);
  send_packet(core_.server, session_id, builder, request_id,
              wire::CreateLeaseGranted(builder, &wire_handle, info,
                                       static_cast<uint32_t>(document->parts.size())));
  send_segments(handle, *lease);
}

void Leases::hold_segments(Lease& lease) {
  const auto& parts = lease.document->parts;
  for (; lease.held_count < parts.size(); ++lease.held_count)
    core_.segments.hold(*lease.process, parts[lease.held_count].segment);
}

void Leases::on_grown(const Document& document) {
  const auto found = growing_.find(&document);
  if (found == growing_.end()) return;
  const std::vector<Handle> handles = found->second;
  if (document.state != DocumentState::filling) growing_.erase(found);
  for (const Handle& handle : handles) {
    const std::shared_ptr<Lease> lease = table_.find(handle);
    if (lease->process->is_gone) continue;  // its session ends
    hold_segments(*lease);
    send_segments(handle, *lease);
  }
}

void Leases::on_stalled(const Document& document) {
  const auto found = growing_.find(&document);
  if (found == growing_.end()) return;
  const std::vector<Handle> handles = found->second;
  // What was dropped has no next producer.
  if (document.state == DocumentState::retiring) growing_.erase(found);
  for (const Handle& handle : handles) {
    const std::shared_ptr<Lease> lease = table_.find(handle);
    const bool is_final = document.state == DocumentState::retiring;
    if (std::exchange(lease->is_told_stalled, true) && !is_final) continue;
    flatbuffers::FlatBufferBuilder builder;
    const wire::Handle wire_handle = to_wire(handle);
    send_packet(core_.server, lease->session, builder, lease->request_id,
                wire::CreateLeaseStalled(builder, &wire_handle, is_final));
  }
}

void Leases::send_segments(const Handle& handle, Lease& lease) {
  const auto& parts = lease.document->parts;
  const size_t per_packet = core_.limits.segments_per_packet;
  while (lease.sent_count < parts.size() &&
         lease.unacknowledged.size() < core_.limits.unacknowledged_packets_max) {
    const size_t count = std::min(per_packet, parts.size() - lease.sent_count);
    std::vector<wire::SegmentInfo> infos;
    std::vector<wire::DeviceMemory> memories;
    std::vector<SharedFd> fds;
    for (size_t i = lease.sent_count; i < lease.sent_count + count; ++i) {
      const Segment& segment = *parts[i].segment;
      infos.emplace_back(segment.first_token, parts[i].token_count, segment.size_bytes);
      if (segment.device) memories.push_back(to_wire(*segment.device, core_.epoch));
      fds.push_back(segment.readable);
    }
    flatbuffers::FlatBufferBuilder builder;
    const wire::Handle wire_handle = to_wire(handle);
    const auto body = wire::CreateLeaseSegmentsDirect(
        builder, &wire_handle, static_cast<uint32_t>(lease.sent_count), &infos,
        memories.empty() ? nullptr : &memories);
    lease.sent_count += count;
    lease.unacknowledged.push_back(lease.sent_count);
    lease.is_told_stalled = false;
    send_packet(core_.server, lease.session, builder, lease.request_id, body, std::move(fds));
  }
}

std::shared_ptr<Lease> Leases::find(const Session& session, const Handle& handle) const {
  std::shared_ptr<Lease> lease = table_.find(handle);
  return lease != nullptr && lease->session == session.id ? lease : nullptr;
}

void Leases::on_ack(Session& session, const wire::SegmentAck& ack) {
  if (ack.lease() == nullptr) return;
  const Handle handle = from_wire(*ack.lease());
  const std::shared_ptr<Lease> lease = find(session, handle);
  if (lease == nullptr) return;  // released meanwhile
  auto& unacknowledged = lease->unacknowledged;
  if (ack.received_count() > lease->sent_count || ack.received_count() < lease->received_count) {
    return core_.server.drop(
        session.id, {POLYKV_ERR_PROTOCOL, format("acknowledge segments: %u received, %zu were sent",
                                                 ack.received_count(), lease->sent_count)});
  }
  lease->received_count = ack.received_count();
  while (!unacknowledged.empty() && unacknowledged.front() <= ack.received_count())
    unacknowledged.pop_front();
  send_segments(handle, *lease);
}

void Leases::on_release(Session& session, uint64_t request_id, const wire::Release& release) {
  const Handle handle = release.lease() == nullptr ? Handle{} : from_wire(*release.lease());
  const std::shared_ptr<Lease> lease = find(session, handle);
  if (lease == nullptr)
    return core_.server.reply_error(session.id, request_id, table_.stale("release", handle));
  for (size_t i = 0; i < lease->held_count; ++i)
    core_.segments.release(*lease->process, *lease->document->parts[i].segment);
  std::erase(of_session_[session.id], handle);
  end(handle, *lease);
  core_.server.reply_done(session.id, request_id);
}

void Leases::on_session_end(const Session& session) {
  const auto found = of_session_.find(session.id);
  if (found == of_session_.end()) return;
  const std::vector<Handle> handles = std::move(found->second);
  of_session_.erase(found);
  for (const Handle& handle : handles) end(handle, *table_.find(handle));
}

void Leases::end(const Handle& handle, Lease& lease) {
  const std::shared_ptr<Document> document = lease.document;
  if (const auto found = growing_.find(document.get()); found != growing_.end()) {
    std::erase(found->second, handle);
    if (found->second.empty()) growing_.erase(found);
  }
  table_.erase(handle);
  core_.catalog.end_lease(*document);
}

}  // namespace polykv::daemon
