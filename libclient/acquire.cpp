#include "libclient/acquire.h"

#include <vector>

#include "common/memfd.h"

namespace polykv::lib {

namespace {

// What the daemon gets beyond the caller's own deadline before the wait is given up here.
constexpr int64_t kGraceMs = 10'000;

flatbuffers::Offset<flatbuffers::String> text_unless_empty(flatbuffers::FlatBufferBuilder& builder,
                                                           const std::string& text) {
  return text.empty() ? flatbuffers::Offset<flatbuffers::String>() : builder.CreateString(text);
}

/// A token list travels in a sealed memfd; none for an empty list.
Result<UniqueFd> tokens_for_wire(std::span<const uint32_t> tokens) {
  if (tokens.empty()) return UniqueFd();
  if (tokens.size() > kMaxTokens) {
    return {POLYKV_ERR_LIMIT, format("send %zu tokens: a document has at most %llu", tokens.size(),
                                     static_cast<unsigned long long>(kMaxTokens))};
  }
  return memfd_from_tokens(tokens);
}

/// The descriptors of those that are there, in order.
std::vector<int> present(std::initializer_list<int> fds) {
  std::vector<int> result;
  for (const int fd : fds) {
    if (fd >= 0) result.push_back(fd);
  }
  return result;
}

/// Gives up a waiting request. What came anyway in the meantime is the caller's.
Result<Message> cancel_and_take_final(Exchange& exchange, const Status& reason) {
  const Deadline deadline = deadline_after_ms(kGraceMs);
  POLYKV_RETURN_IF_ERROR(exchange.cancel());
  for (;;) {
    Result<Message> message = exchange.next(deadline);
    if (message.is_ok() && message->as<wire::IngestProgress>() != nullptr) continue;
    const polykv_status code = message.status().code();
    if (!message.is_ok() && (code == POLYKV_ERR_CANCELLED || code == POLYKV_ERR_TIMEOUT)) {
      return reason;
    }
    return message;
  }
}

polykv_ingest_progress to_c(const wire::IngestProgress& progress) {
  polykv_ingest_progress out{};
  out.struct_size = sizeof out;
  out.phase = static_cast<polykv_ingest_phase>(progress.phase());
  out.tokens_done = progress.tokens_done();
  out.token_count = progress.token_count();
  out.memory_bytes = progress.memory_bytes();
  return out;
}

}  // namespace

Result<Acquired> acquire(const std::shared_ptr<Session>& session, const AcquireRequest& request) {
  POLYKV_ASSIGN_OR_RETURN(const UniqueFd tokens, tokens_for_wire(request.tokens));
  flatbuffers::FlatBufferBuilder builder;
  const auto name = text_unless_empty(builder, request.name);
  const auto model_name = text_unless_empty(builder, request.model_name);
  const auto publish_name = text_unless_empty(builder, request.publish_name);
  const auto model = request.model == nullptr ? flatbuffers::Offset<wire::Model>()
                                              : to_wire(builder, *request.model);
  wire::Digest digest;
  if (request.digest) digest = to_wire(*request.digest);
  wire::Digest extends;
  if (request.extends) extends = to_wire(*request.extends);
  wire::AcquireBuilder body(builder);
  body.add_name(name);
  if (request.digest) body.add_digest(&digest);
  body.add_model(model);
  body.add_model_name(model_name);
  body.add_has_model_fd(request.model_fd >= 0);
  body.add_token_count(request.tokens.size());
  body.add_profile(static_cast<uint32_t>(request.profile));
  body.add_may_produce(request.may_produce);
  body.add_wait(request.wait);
  body.add_timeout_ms(request.timeout_ms);
  body.add_publish_name(publish_name);
  body.add_replace_name(request.replace_name);
  body.add_is_public(request.is_public);
  body.add_job(request.job);
  if (request.ticket != nullptr) body.add_ticket(request.ticket);
  body.add_stream(request.stream);
  if (request.extends) body.add_extends(&extends);

  POLYKV_ASSIGN_OR_RETURN(
      Exchange exchange,
      session->start(builder, body.Finish(), present({request.model_fd, tokens.get()})));
  // The daemon keeps the deadline of a wait; without WAIT it may still have to read a model file.
  const int64_t timeout_ms = request.wait ? request.timeout_ms : kReplyTimeoutMs;
  const Deadline deadline = deadline_after_ms(timeout_ms < 0 ? -1 : timeout_ms + kGraceMs);
  Result<Message> reply = exchange.next(deadline);
  if (reply.status().code() == POLYKV_ERR_TIMEOUT && Clock::now() >= deadline) {
    reply = cancel_and_take_final(exchange, reply.status());
  }
  if (!reply.is_ok()) return reply.status();

  Acquired acquired;
  if (const auto* granted = reply->as<wire::LeaseGranted>()) {
    POLYKV_ASSIGN_OR_RETURN(acquired.lease, Lease::receive(session, std::move(exchange), *granted));
  } else if (const auto* ticket = reply->as<wire::TicketGranted>()) {
    POLYKV_ASSIGN_OR_RETURN(acquired.publisher,
                            Publisher::create(session, *ticket, request.tokens, request.profile));
  } else {
    return unexpected_packet(*reply, wire::Body::LeaseGranted);
  }
  return acquired;
}

Result<std::unique_ptr<Lease>> ingest(const std::shared_ptr<Session>& session,
                                      const IngestRequest& request) {
  POLYKV_ASSIGN_OR_RETURN(const UniqueFd tokens, tokens_for_wire(request.tokens));
  flatbuffers::FlatBufferBuilder builder;
  const auto name = text_unless_empty(builder, request.name);
  const auto model_name = text_unless_empty(builder, request.model_name);
  const auto extend_name = text_unless_empty(builder, request.extend_name);
  wire::Digest extend_digest;
  if (request.extend_digest) extend_digest = to_wire(*request.extend_digest);
  wire::IngestBuilder body(builder);
  body.add_name(name);
  body.add_model_name(model_name);
  body.add_has_model_fd(request.model_fd >= 0);
  body.add_has_text_fd(request.text_fd >= 0);
  body.add_token_count(request.tokens.size());
  body.add_has_before_fd(request.before_fd >= 0);
  body.add_profile(static_cast<uint32_t>(request.profile));
  body.add_add_bos(request.add_bos);
  body.add_parse_special(request.parse_special);
  body.add_chat_head(request.chat_head);
  body.add_replace_name(request.replace_name);
  body.add_share_public(request.share_public);
  body.add_want_lease(request.want_lease);
  body.add_extend_name(extend_name);
  if (request.extend_digest) body.add_extend_digest(&extend_digest);
  body.add_recompute_prefix(request.recompute_prefix);
  const auto fds = present({request.model_fd, request.text_fd, tokens.get(), request.before_fd});
  POLYKV_ASSIGN_OR_RETURN(Exchange exchange, session->start(builder, body.Finish(), fds));

  const Deadline deadline = deadline_after_ms(request.timeout_ms);
  Result<Message> reply = exchange.next(deadline);
  for (; reply.is_ok(); reply = exchange.next(deadline)) {
    const auto* progress = reply->as<wire::IngestProgress>();
    if (progress == nullptr) break;
    if (request.on_progress && !request.on_progress(to_c(*progress))) {
      reply = cancel_and_take_final(
          exchange, {POLYKV_ERR_CANCELLED, "ingest: cancelled by the progress callback"});
      break;
    }
  }
  if (reply.status().code() == POLYKV_ERR_TIMEOUT && Clock::now() >= deadline) {
    reply = cancel_and_take_final(
        exchange, {POLYKV_ERR_TIMEOUT, "ingest: the deadline passed; the daemon was told to stop"});
  }
  if (!reply.is_ok()) return reply.status();

  if (const auto* granted = reply->as<wire::LeaseGranted>()) {
    POLYKV_ASSIGN_OR_RETURN(auto lease, Lease::receive(session, std::move(exchange), *granted));
    if (!request.want_lease) return unexpected_packet(*reply, wire::Body::Done);
    return lease;
  }
  if (reply->as<wire::Done>() == nullptr || request.want_lease) {
    return unexpected_packet(*reply, wire::Body::LeaseGranted);
  }
  return std::unique_ptr<Lease>();
}

}  // namespace polykv::lib
