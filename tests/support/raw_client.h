// Speaks the wire protocol to polykvd by hand, so that tests say and see exactly what travels.
// Blocking, with a guard against hanging; throws std::runtime_error. One thread.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/mapping.h"
#include "common/memfd.h"
#include "common/packet_socket.h"
#include "common/wire.h"
#include "device/runtime.h"
#include "tests/support/emulated_device.h"
#include "tests/support/segments.h"

namespace polykv::test {

inline UniqueFd own_pidfd() {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
}

template <typename T>
T take(Result<T> result) {
  if (!result) throw std::runtime_error(result.status().message());
  return std::move(result).value();
}

/// A packet from the daemon, with its descriptors.
struct Reply {
  ReceivedPacket received;
  const wire::Packet* packet = nullptr;

  uint64_t id() const { return packet->request_id(); }
  bool is(wire::Body type) const { return packet->body_type() == type; }
  /// Throws, with the error's message, when it is something else.
  template <typename Table>
  const Table& as() const {
    if (const Table* table = packet->body_as<Table>()) return *table;
    throw std::runtime_error(std::string("unexpected ") + wire::EnumNameBody(packet->body_type()) +
                             ": " + message());
  }
  /// POLYKV_OK when it is no Error.
  polykv_status code() const {
    const wire::Error* error = packet->body_as_Error();
    return error == nullptr ? POLYKV_OK : static_cast<polykv_status>(error->code());
  }
  std::string message() const {
    const wire::Error* error = packet->body_as_Error();
    return error == nullptr ? "" : std::string(text_or_empty(error->message()));
  }
};

/// The document that tests publish unless they say otherwise: two small layers.
struct TestDocument {
  ModelIdentity model = test_model({{2, 64, 64, 0}, {1, 64, 64, 0}});
  std::vector<uint32_t> tokens = test_ids(300);
  Profile profile = Profile::k8v8;

  /// What a segment takes of the budget, in the memory where the test's daemon keeps it.
  uint64_t segment_bytes(uint64_t first, uint64_t count) const {
    const SegmentHeader header = planned(first, count);
    return TestDevice::is_wanted() ? device::round_up(header.total_bytes - header.data_offset)
                                   : header.total_bytes;
  }
  /// What it takes of the host's memory until it is sealed.
  uint64_t host_bytes(uint64_t first, uint64_t count) const {
    return planned(first, count).total_bytes;
  }

 private:
  SegmentHeader planned(uint64_t first, uint64_t count) const {
    SegmentSpec spec;
    spec.identity = model;
    spec.profile = profile;
    spec.first_token = first;
    spec.token_count = count;
    spec.digest_count = segment_digest_count(first, count, first + count == tokens.size());
    return take(plan_segment(spec)).header;
  }
};

/// Another document of the same model.
inline TestDocument document_number(uint32_t number, uint64_t token_count = 300) {
  TestDocument document;
  document.tokens = test_ids(token_count);
  document.tokens[0] = 1'000'000 + number;
  return document;
}

struct AcquireFields {
  std::string name;
  std::optional<Digest> digest;
  bool may_produce = false;
  bool wait = false;
  int64_t timeout_ms = -1;
  std::string publish_name;
  bool replace_name = false;
  bool is_public = false;
  bool stream = false;
  std::optional<Digest> extends;
};

class RawClient {
 public:
  /// Connects; with hello also shakes hands.
  explicit RawClient(const std::string& socket_path, bool hello = true)
      : socket_(take(packet_connect(socket_path))) {
    set_receive_guard(60);
    if (hello) shake_hands();
  }

  void shake_hands(uint32_t version = kProtocolVersion,
                   uint32_t version_min = kProtocolVersionMin) {
    send_hello(version, version_min, own_pidfd());
    const Reply reply = receive();
    epoch_ = reply.as<wire::Welcome>().epoch();
  }
  void send_hello(uint32_t version, uint32_t version_min, const UniqueFd& pidfd) {
    flatbuffers::FlatBufferBuilder builder;
    const auto hello = wire::CreateHelloDirect(builder, version, version_min, "test", "raw_client");
    send_bytes(make_packet(builder, 1, hello), {pidfd.get()});
  }

  int socket() const { return socket_.get(); }
  uint64_t epoch() const { return epoch_; }
  void close() { socket_.reset(); }
  void set_receive_guard(int seconds) {
    const timeval limit{seconds, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }

  void send_bytes(const std::vector<uint8_t>& bytes, const std::vector<int>& fds = {}) {
    const Result<SocketResult> sent = packet_send(socket_.get(), bytes, fds);
    if (!sent || *sent != SocketResult::done) throw std::runtime_error("cannot send");
  }
  /// Sends the packet whose last table is body, under a new request id, which it returns.
  template <typename Table>
  uint64_t send(flatbuffers::FlatBufferBuilder& builder, flatbuffers::Offset<Table> body,
                const std::vector<int>& fds = {}) {
    const uint64_t id = next_id_++;
    send_bytes(make_packet(builder, id, body), fds);
    return id;
  }

  /// Nothing: the daemon has closed the connection.
  std::optional<Reply> try_receive() {
    Reply reply;
    const Result<SocketResult> got = packet_receive(socket_.get(), reply.received);
    if (!got) throw std::runtime_error(got.status().message());
    if (*got == SocketResult::would_block) throw std::runtime_error("the daemon does not answer");
    if (*got == SocketResult::closed) return std::nullopt;
    reply.packet = take(parse_packet(reply.received.bytes));
    return reply;
  }
  Reply receive() {
    std::optional<Reply> reply = try_receive();
    if (!reply) throw std::runtime_error("the daemon closed the connection");
    return std::move(*reply);
  }
  /// The next packet, which must be the answer to that request.
  Reply receive(uint64_t id) {
    Reply reply = receive();
    if (reply.id() != id) throw std::runtime_error("a reply to another request");
    return reply;
  }
  /// Whether the daemon ends this connection; takes what comes before that, for example an Error.
  bool is_closed_by_daemon() {
    while (std::optional<Reply> reply = try_receive()) last_error_ = reply->code();
    return true;
  }
  polykv_status last_error() const { return last_error_; }

  // ---- requests ----

  uint64_t send_acquire(const AcquireFields& fields, const TestDocument* document = nullptr) {
    flatbuffers::FlatBufferBuilder builder;
    const auto name = fields.name.empty() ? 0 : builder.CreateString(fields.name);
    const auto publish_name =
        fields.publish_name.empty() ? 0 : builder.CreateString(fields.publish_name);
    flatbuffers::Offset<wire::Model> model;
    UniqueFd tokens;
    if (document != nullptr) {
      model = to_wire(builder, document->model);
      if (!document->tokens.empty()) tokens = take(memfd_from_tokens(document->tokens));
    }
    wire::Digest digest;
    if (fields.digest) digest = to_wire(*fields.digest);
    const wire::Digest extends = to_wire(fields.extends.value_or(Digest{}));
    wire::AcquireBuilder acquire(builder);
    if (!name.IsNull()) acquire.add_name(name);
    if (fields.digest) acquire.add_digest(&digest);
    if (document != nullptr) {
      acquire.add_model(model);
      acquire.add_token_count(document->tokens.size());
      acquire.add_profile(static_cast<uint32_t>(document->profile));
    }
    acquire.add_may_produce(fields.may_produce);
    acquire.add_wait(fields.wait);
    acquire.add_timeout_ms(fields.timeout_ms);
    if (!publish_name.IsNull()) acquire.add_publish_name(publish_name);
    acquire.add_replace_name(fields.replace_name);
    acquire.add_is_public(fields.is_public);
    acquire.add_stream(fields.stream);
    if (fields.extends) acquire.add_extends(&extends);
    return send(builder, acquire.Finish(),
                tokens ? std::vector<int>{tokens.get()} : std::vector<int>{});
  }
  Reply acquire(const AcquireFields& fields, const TestDocument* document = nullptr) {
    return receive(send_acquire(fields, document));
  }
  /// Becomes the producer, or throws why not.
  wire::Handle become_producer(const TestDocument& document, const std::string& name = "") {
    AcquireFields fields;
    fields.may_produce = true;
    fields.publish_name = name;
    return *acquire(fields, &document).as<wire::TicketGranted>().ticket();
  }

  /// Leases what is sealed of the document that the ticket is for.
  Reply acquire_sealed(const wire::Handle& ticket) {
    flatbuffers::FlatBufferBuilder builder;
    wire::AcquireBuilder acquire(builder);
    acquire.add_ticket(&ticket);
    return receive(send(builder, acquire.Finish()));
  }

  uint64_t send_reserve(const wire::Handle& ticket, uint64_t first, uint64_t count) {
    flatbuffers::FlatBufferBuilder builder;
    return send(builder, wire::CreateSegmentReserve(builder, &ticket, first, count));
  }
  Reply reserve(const wire::Handle& ticket, uint64_t first, uint64_t count) {
    return receive(send_reserve(ticket, first, count));
  }
  uint64_t send_commit(const wire::Handle& segment) {
    flatbuffers::FlatBufferBuilder builder;
    return send(builder, wire::CreateSegmentCommit(builder, &segment));
  }
  Reply commit(const wire::Handle& segment) { return receive(send_commit(segment)); }
  Reply segment_abort(const wire::Handle& segment) {
    flatbuffers::FlatBufferBuilder builder;
    return receive(send(builder, wire::CreateSegmentAbort(builder, &segment)));
  }
  Reply ticket_abort(const wire::Handle& ticket) {
    flatbuffers::FlatBufferBuilder builder;
    return receive(send(builder, wire::CreateTicketAbort(builder, &ticket)));
  }
  Reply progress(const wire::Handle& ticket, uint64_t tokens_done = 0) {
    flatbuffers::FlatBufferBuilder builder;
    return receive(send(builder, wire::CreateTicketProgress(builder, &ticket, tokens_done)));
  }
  Reply release(const wire::Handle& lease) {
    flatbuffers::FlatBufferBuilder builder;
    return receive(send(builder, wire::CreateRelease(builder, &lease)));
  }
  void acknowledge(const wire::Handle& lease, uint32_t received_count) {
    flatbuffers::FlatBufferBuilder builder;
    send_bytes(make_packet(builder, 0, wire::CreateSegmentAck(builder, &lease, received_count)));
  }
  Reply cancel(uint64_t target) {
    flatbuffers::FlatBufferBuilder builder;
    return receive(send(builder, wire::CreateCancel(builder, target)));
  }
  Reply list(uint64_t cursor = 0) {
    flatbuffers::FlatBufferBuilder builder;
    return receive(send(builder, wire::CreateList(builder, cursor)));
  }
  Reply remove(const std::string& name, const Digest* digest = nullptr) {
    flatbuffers::FlatBufferBuilder builder;
    const auto text = name.empty() ? 0 : builder.CreateString(name);
    const wire::Digest wire_digest = digest == nullptr ? wire::Digest() : to_wire(*digest);
    return receive(send(
        builder, wire::CreateRemove(builder, text, digest == nullptr ? nullptr : &wire_digest)));
  }
  Reply status() {
    flatbuffers::FlatBufferBuilder builder;
    return receive(send(builder, wire::CreateGetStatus(builder)));
  }

  // ---- whole jobs ----

  /// Writes random values into a reserved segment and unmaps it.
  static void fill(const Reply& reserved_reply, const TestDocument& document, uint64_t first,
                   uint64_t count) {
    const auto& reserved = reserved_reply.as<wire::SegmentReserved>();
    Mapping mapping = take(Mapping::map(reserved_reply.received.fds.at(0).get(),
                                        reserved.size_bytes(), MapAccess::read_write));
    write_segment(reserved, document, first, count, mapping.writable_bytes());
  }
  static void write_segment(const wire::SegmentReserved& reserved, const TestDocument& document,
                            uint64_t first, uint64_t count, std::span<uint8_t> bytes) {
    SegmentSpec spec;
    spec.identity = document.model;
    spec.profile = document.profile;
    spec.first_token = first;
    spec.token_count = count;
    std::vector<Digest> digests;
    for (const wire::Digest* digest : *reserved.digests()) digests.push_back(from_wire(*digest));
    spec.digest_count = static_cast<uint32_t>(digests.size());
    const SegmentContents contents{std::span(document.tokens).subspan(first, count),
                                   from_wire(*reserved.parent_digest()), digests,
                                   PrefixTreatment::none};
    SegmentWriter writer = take(SegmentWriter::create(spec, contents, bytes));
    for (uint32_t i = 0; i < document.model.layers.size(); ++i) {
      const LayerValues values = random_values(document.model.layers[i], count, i + 1);
      if (const Status status = writer.encode_layer(i, values.source()); !status.is_ok())
        throw std::runtime_error(status.message());
    }
    if (const Status status = writer.finish(); !status.is_ok())
      throw std::runtime_error(status.message());
  }
  /// Reserves, fills and commits the next segment of a ticket's document.
  void publish_segment(const wire::Handle& ticket, const TestDocument& document, uint64_t first,
                       uint64_t count) {
    const Reply reserved = reserve(ticket, first, count);
    fill(reserved, document, first, count);
    (void)commit(*reserved.as<wire::SegmentReserved>().segment()).as<wire::Done>();
  }
  /// Publishes all of a document in segments of at most segment_tokens; returns its digest.
  Digest publish(const TestDocument& document, const std::string& name = "",
                 uint64_t segment_tokens = 4096) {
    const wire::Handle ticket = become_producer(document, name);
    for (uint64_t first = 0; first < document.tokens.size(); first += segment_tokens) {
      const uint64_t count = std::min<uint64_t>(segment_tokens, document.tokens.size() - first);
      const Reply reserved = reserve(ticket, first, count);
      fill(reserved, document, first, count);
      (void)commit(*reserved.as<wire::SegmentReserved>().segment()).as<wire::Done>();
    }
    return chain_digests(chain_root(document.model), document.tokens).back();
  }

  struct LeasedDocument {
    wire::Handle lease;
    std::vector<UniqueFd> fds;          // of its segments
    std::vector<uint64_t> sizes_bytes;  // of the files: what is in device memory is not in them
  };
  /// Takes LeaseGranted and all its LeaseSegments, acknowledging each.
  LeasedDocument take_lease(uint64_t request_id) {
    const Reply granted = receive(request_id);
    LeasedDocument leased{*granted.as<wire::LeaseGranted>().lease(), {}, {}};
    const uint32_t segment_count = granted.as<wire::LeaseGranted>().segment_count();
    while (leased.fds.size() < segment_count) {
      Reply event = receive(request_id);
      for (UniqueFd& fd : event.received.fds) {
        leased.sizes_bytes.push_back(static_cast<uint64_t>(::lseek(fd.get(), 0, SEEK_END)));
        leased.fds.push_back(std::move(fd));
      }
      acknowledge(leased.lease, static_cast<uint32_t>(leased.fds.size()));
    }
    return leased;
  }
  LeasedDocument lease(const std::string& name) {
    AcquireFields fields;
    fields.name = name;
    return take_lease(send_acquire(fields));
  }

 private:
  UniqueFd socket_;
  uint64_t epoch_ = 0;
  uint64_t next_id_ = 2;
  polykv_status last_error_ = POLYKV_OK;
};

}  // namespace polykv::test
