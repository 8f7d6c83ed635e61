#include "daemon/message_rules.h"

namespace polykv::daemon {

namespace {

enum class Sender { anybody, client, worker, daemon };

struct Rule {
  Sender sender = Sender::daemon;
  bool is_request = true;  // has a request id and gets a reply
  size_t fd_count = 0;
};

size_t acquire_fd_count(const wire::Acquire& acquire) {
  return (acquire.has_model_fd() ? 1 : 0) + (acquire.token_count() > 0 ? 1 : 0);
}

size_t ingest_fd_count(const wire::Ingest& ingest) {
  return (ingest.has_model_fd() ? 1 : 0) +
         (ingest.has_text_fd() || ingest.token_count() > 0 ? 1 : 0) +
         (ingest.has_before_fd() ? 1 : 0);
}

Rule rule_of(const wire::Packet& packet) {
  switch (packet.body_type()) {
    case wire::Body::Acquire:
      return {Sender::anybody, true, acquire_fd_count(*packet.body_as_Acquire())};
    case wire::Body::Release:
    case wire::Body::SegmentReserve:
    case wire::Body::SegmentCommit:
    case wire::Body::SegmentAbort:
    case wire::Body::TicketProgress:
    case wire::Body::TicketAbort:
    case wire::Body::Cancel:
      return {Sender::anybody, true, 0};
    case wire::Body::SegmentAck:
      return {Sender::anybody, false, 0};
    case wire::Body::Ingest:
      return {Sender::client, true, ingest_fd_count(*packet.body_as_Ingest())};
    case wire::Body::List:
    case wire::Body::Remove:
    case wire::Body::GetStatus:
      return {Sender::client, true, 0};
    case wire::Body::WorkerReady:
    case wire::Body::WorkerFailed:
    case wire::Body::JobProgress:
    case wire::Body::JobDone:
      return {Sender::worker, false, 0};
    default:
      return {};
  }
}

}  // namespace

Status check_message(const wire::Packet& packet, SessionKind sender, size_t fd_count) {
  const Rule rule = rule_of(packet);
  const char* name = wire::EnumNameBody(packet.body_type());
  if (rule.sender == Sender::daemon ||
      (rule.sender == Sender::client && sender != SessionKind::client) ||
      (rule.sender == Sender::worker && sender != SessionKind::worker)) {
    return {POLYKV_ERR_PROTOCOL, format("read a packet: %s may not be sent here", name)};
  }
  if (rule.is_request && packet.request_id() == 0)
    return {POLYKV_ERR_PROTOCOL, format("read a packet: %s needs a request id", name)};
  if (fd_count != rule.fd_count) {
    return {POLYKV_ERR_PROTOCOL,
            format("read a packet: %s came with %zu descriptors instead of %zu", name, fd_count,
                   rule.fd_count)};
  }
  return Status::ok();
}

}  // namespace polykv::daemon
