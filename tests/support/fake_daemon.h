// The daemon's end of a socket pair, for tests of the client alone: receives requests and answers
// as the test says. Fails the test by REQUIRE; use it from one thread.
#pragma once

#include <catch2/catch.hpp>
#include <thread>

#include "common/packet_socket.h"
#include "common/wire.h"
#include "libclient/session.h"
#include "tests/support/require_ok.h"

namespace polykv::test {

struct Request {
  ReceivedPacket received;
  const wire::Packet* packet = nullptr;
  uint64_t id() const { return packet->request_id(); }
  template <typename Table>
  const Table* as() const {
    const Table* table = packet->body_as<Table>();
    REQUIRE(table != nullptr);
    return table;
  }
};

class FakeDaemon {
 public:
  FakeDaemon() {
    auto ends = packet_socketpair();
    REQUIRE_OK(ends);
    socket_ = std::move(ends->first);
    client_end_ = std::move(ends->second);
  }

  /// The client's session after a good handshake.
  std::shared_ptr<lib::Session> connect(bool is_worker = false) {
    std::thread peer([this] { welcome(); });
    auto session = lib::Session::adopt(std::move(client_end_), "test",
                                       lib::deadline_after_ms(10'000), is_worker);
    peer.join();
    REQUIRE_OK(session);
    return *session;
  }

  UniqueFd take_client_end() { return std::move(client_end_); }

  Request receive() {
    Request request;
    const auto result = packet_receive(socket_.get(), request.received);
    if (!result.is_ok() || *result != SocketResult::done) return request;
    const auto packet = parse_packet(request.received.bytes);
    if (packet.is_ok()) request.packet = *packet;
    return request;
  }

  template <typename Table>
  void send(flatbuffers::FlatBufferBuilder& builder, uint64_t id, flatbuffers::Offset<Table> body,
            std::span<const int> fds = {}) {
    static_cast<void>(packet_send(socket_.get(), make_packet(builder, id, body), fds).is_ok());
  }
  void send_done(uint64_t id) {
    flatbuffers::FlatBufferBuilder builder;
    send(builder, id, wire::CreateDone(builder));
  }
  void send_error(uint64_t id, polykv_status code, const char* message) {
    flatbuffers::FlatBufferBuilder builder;
    const auto text = builder.CreateString(message);
    send(builder, id, wire::CreateError(builder, static_cast<uint32_t>(code), text));
  }
  void send_status(uint64_t id, int64_t pid) {
    flatbuffers::FlatBufferBuilder builder;
    wire::StatusReplyBuilder body(builder);
    body.add_pid(pid);
    send(builder, id, body.Finish());
  }

  void welcome(uint32_t version = kProtocolVersion) {
    const Request hello = receive();
    flatbuffers::FlatBufferBuilder builder;
    const auto text = builder.CreateString("9.9.9");
    send(builder, hello.packet == nullptr ? 0 : hello.id(),
         wire::CreateWelcome(builder, version, 42, text, 30'000));
  }

  void hang_up() { socket_.reset(); }
  int socket() const { return socket_.get(); }

 private:
  UniqueFd socket_;
  UniqueFd client_end_;
};

}  // namespace polykv::test
