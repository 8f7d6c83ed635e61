#include "libclient/session.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <set>

#include "libclient/document.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::lib;
using polykv::test::FakeDaemon;
using polykv::test::Request;

namespace {

Result<Exchange> ask_status(Session& session) {
  flatbuffers::FlatBufferBuilder builder;
  return session.start(builder, wire::CreateGetStatus(builder));
}

int64_t pid_of(const Result<Message>& message) {
  REQUIRE_OK(message);
  const auto* status = message->as<wire::StatusReply>();
  return status == nullptr ? -1 : status->pid();
}

Deadline soon() {
  return deadline_after_ms(10'000);
}

}  // namespace

TEST_CASE("the handshake sends this process's pidfd and learns epoch, version and stall deadline") {
  FakeDaemon daemon;
  std::string fdinfo;
  std::thread peer([&] {
    const Request hello = daemon.receive();
    if (hello.packet == nullptr || hello.received.fds.size() != 1) return;
    const int fd =
        ::open(format("/proc/self/fdinfo/%d", hello.received.fds[0].get()).c_str(), O_RDONLY);
    char text[1024];
    const ssize_t size = ::read(fd, text, sizeof text);
    ::close(fd);
    fdinfo.assign(text, size > 0 ? static_cast<size_t>(size) : 0);
    flatbuffers::FlatBufferBuilder builder;
    const auto version = builder.CreateString("9.9.9");
    daemon.send(builder, hello.id(), wire::CreateWelcome(builder, 1, 42, version, 30'000));
  });
  const auto session = Session::adopt(daemon.take_client_end(), "test", soon());
  peer.join();
  REQUIRE_OK(session);
  CHECK(fdinfo.find(format("Pid:\t%d\n", ::getpid())) != std::string::npos);
  CHECK((*session)->epoch() == 42);
  CHECK((*session)->stall_deadline_ms() == 30'000);
  CHECK((*session)->daemon_version() == "9.9.9");
}

TEST_CASE("a refused handshake has the daemon's code and message") {
  for (const uint64_t id : {uint64_t{0}, uint64_t{1}}) {
    FakeDaemon daemon;
    std::thread peer([&] {
      daemon.receive();
      daemon.send_error(id, POLYKV_ERR_LIMIT, "connect: 64 sessions of this user; close some");
      daemon.hang_up();
    });
    const auto session = Session::adopt(daemon.take_client_end(), "test", soon());
    peer.join();
    REQUIRE(!session.is_ok());
    CHECK(session.status().code() == POLYKV_ERR_LIMIT);
    CHECK(session.status().message().find("64 sessions") != std::string::npos);
  }
}

TEST_CASE("a daemon of another protocol version is refused with both versions") {
  FakeDaemon daemon;
  std::thread peer([&] { daemon.welcome(7); });
  const auto session = Session::adopt(daemon.take_client_end(), "test", soon());
  peer.join();
  REQUIRE(session.status().code() == POLYKV_ERR_VERSION);
  CHECK(session.status().message().find("version 7") != std::string::npos);
}

TEST_CASE("a handshake without an answer ends at its deadline") {
  FakeDaemon daemon;
  const auto session = Session::adopt(daemon.take_client_end(), "test", deadline_after_ms(20));
  CHECK(session.status().code() == POLYKV_ERR_TIMEOUT);
}

TEST_CASE("replies out of order reach the requests they answer") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  auto first = ask_status(*session);
  auto second = ask_status(*session);
  REQUIRE((first.is_ok() && second.is_ok()));
  CHECK(first->id() != second->id());
  daemon.send_status(second->id(), 2);
  daemon.send_status(first->id(), 1);
  CHECK(pid_of(first->next(soon())) == 1);
  CHECK(pid_of(second->next(soon())) == 2);
}

TEST_CASE("many threads share a session and each gets its own answers") {
  constexpr int kThreads = 8;
  constexpr int kRounds = 200;
  FakeDaemon daemon;
  const auto session = daemon.connect();
  std::thread peer([&] {
    // Answers all that are there, the last one first.
    std::vector<uint64_t> held;
    for (int served = 0; served < kThreads * kRounds; ++served) {
      const Request request = daemon.receive();
      if (request.packet == nullptr) return;
      held.push_back(request.id());
      pollfd more{daemon.socket(), POLLIN, 0};
      if (::poll(&more, 1, 0) == 1) continue;
      for (auto id = held.rbegin(); id != held.rend(); ++id) {
        daemon.send_status(*id, static_cast<int64_t>(*id));
      }
      held.clear();
    }
  });
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        auto exchange = ask_status(*session);
        if (!exchange.is_ok()) {
          ++wrong;
          return;
        }
        const auto reply = exchange->next(soon());
        const auto* status = reply.is_ok() ? reply->as<wire::StatusReply>() : nullptr;
        if (status == nullptr || status->pid() != static_cast<int64_t>(exchange->id())) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  session->close();
  peer.join();
  CHECK(wrong == 0);
}

TEST_CASE("a hang-up answers every waiting call, and none hangs") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  std::atomic<int> gone{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] {
      auto exchange = ask_status(*session);
      const auto reply = exchange.is_ok() ? exchange->next(kNoDeadline) : exchange.status();
      if (reply.status().code() == POLYKV_ERR_DAEMON_GONE) ++gone;
    });
  }
  for (int i = 0; i < 6; ++i) daemon.receive();
  daemon.hang_up();
  for (auto& thread : threads) thread.join();
  CHECK(gone == 6);
  CHECK(ask_status(*session).status().code() == POLYKV_ERR_DAEMON_GONE);
}

TEST_CASE("what the daemon said before it hung up is still heard") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  // It never reads these requests: the kernel reports a reset before the queued packets.
  auto first = ask_status(*session);
  auto second = ask_status(*session);
  REQUIRE((first.is_ok() && second.is_ok()));
  daemon.send_status(first->id(), 1);
  daemon.send_error(0, POLYKV_ERR_LIMIT, "drop: too slow; read faster");
  daemon.hang_up();
  CHECK(pid_of(first->next(soon())) == 1);
  const auto reply = second->next(soon());
  CHECK(reply.status().code() == POLYKV_ERR_LIMIT);
  CHECK(reply.status().message() == "drop: too slow; read faster");
}

TEST_CASE("closing a session from another thread ends a wait") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  std::thread closer([&] {
    daemon.receive();
    session->close();
  });
  auto exchange = ask_status(*session);
  REQUIRE_OK(exchange);
  CHECK(exchange->next(kNoDeadline).status().code() == POLYKV_ERR_DAEMON_GONE);
  closer.join();
  CHECK(session->closed_by_caller());
}

TEST_CASE("a packet that breaks the protocol ends the session with POLYKV_ERR_PROTOCOL") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  auto exchange = ask_status(*session);
  REQUIRE_OK(exchange);
  SECTION("bytes that are no packet") {
    const uint8_t noise[64] = {0xff, 0xff, 0xff, 0x7f};
    REQUIRE_OK(packet_send(daemon.socket(), noise));
  }
  SECTION("a descriptor where none belongs") {
    flatbuffers::FlatBufferBuilder builder;
    const int fds[] = {0};
    daemon.send(builder, exchange->id(), wire::CreateDone(builder), fds);
  }
  SECTION("an event that belongs to no request") {
    daemon.send_done(0);
  }
  CHECK(exchange->next(soon()).status().code() == POLYKV_ERR_PROTOCOL);
  CHECK(ask_status(*session).status().code() == POLYKV_ERR_PROTOCOL);
  // The daemon is let go as well.
  while (daemon.receive().packet != nullptr) {
  }
}

TEST_CASE("a reply of another type is POLYKV_ERR_PROTOCOL, and the session goes on") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  auto exchange = ask_status(*session);
  daemon.send_done(exchange->id());
  CHECK(exchange->next_as<wire::StatusReply>(soon()).status().code() == POLYKV_ERR_PROTOCOL);
  auto again = ask_status(*session);
  daemon.send_status(again->id(), 5);
  CHECK(pid_of(again->next(soon())) == 5);
}

TEST_CASE("a lease, ticket or segment that comes after its caller left is given back") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  const wire::Handle handle(42, 7, 3);
  const auto leave_one = [&] {
    auto exchange = ask_status(*session);
    REQUIRE_OK(exchange);
    CHECK(exchange->next(Clock::now()).status().code() == POLYKV_ERR_TIMEOUT);
    return exchange->id();
  };
  const uint64_t lease_id = leave_one();
  const uint64_t ticket_id = leave_one();
  const uint64_t segment_id = leave_one();
  for (int i = 0; i < 3; ++i) daemon.receive();
  flatbuffers::FlatBufferBuilder lease;
  daemon.send(lease, lease_id, wire::CreateLeaseGranted(lease, &handle));
  flatbuffers::FlatBufferBuilder ticket;
  daemon.send(ticket, ticket_id, wire::CreateTicketGranted(ticket, &handle));
  flatbuffers::FlatBufferBuilder segment;
  const int fds[] = {0};
  daemon.send(segment, segment_id, wire::CreateSegmentReserved(segment, &handle), fds);

  auto next = ask_status(*session);
  daemon.send_status(next->id(), 1);
  CHECK(pid_of(next->next(soon())) == 1);
  CHECK(daemon.receive().packet->body_type() == wire::Body::GetStatus);
  CHECK(daemon.receive().as<wire::Release>()->lease()->slot() == 7);
  CHECK(daemon.receive().as<wire::TicketAbort>()->ticket()->generation() == 3);
  CHECK(daemon.receive().as<wire::SegmentAbort>()->segment()->epoch() == 42);
}

TEST_CASE("only the newest progress waits for a slow caller, and its reply is not lost") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  auto exchange = ask_status(*session);
  auto other = ask_status(*session);
  std::thread peer([&] {
    for (uint64_t i = 1; i <= 1000; ++i) {
      flatbuffers::FlatBufferBuilder builder;
      daemon.send(builder, exchange->id(), wire::CreateIngestProgress(builder, 3, i, 1000));
    }
    daemon.send_status(exchange->id(), 9);
    daemon.send_status(other->id(), 1);
  });
  CHECK(pid_of(other->next(soon())) == 1);  // reads all of them for the slow caller
  peer.join();
  const auto progress = exchange->next(soon());
  REQUIRE_OK(progress);
  REQUIRE(progress->as<wire::IngestProgress>() != nullptr);
  CHECK(progress->as<wire::IngestProgress>()->tokens_done() == 1000);
  CHECK(pid_of(exchange->next(soon())) == 9);
}

TEST_CASE("a worker's session keeps packets without a request for next_event") {
  FakeDaemon daemon;
  const auto session = daemon.connect(true);
  flatbuffers::FlatBufferBuilder builder;
  daemon.send(builder, 0, wire::CreateJobCancel(builder, 17));
  auto exchange = ask_status(*session);
  daemon.send_status(exchange->id(), 1);
  CHECK(pid_of(exchange->next(soon())) == 1);
  const auto event = session->next_event(soon());
  REQUIRE_OK(event);
  CHECK(event->as<wire::JobCancel>()->job() == 17);
  daemon.hang_up();
  CHECK(session->next_event(kNoDeadline).status().code() == POLYKV_ERR_DAEMON_GONE);
}

TEST_CASE("after fork the child's handle answers FORKED and the parent's connection lives on") {
  FakeDaemon daemon;
  auto session = daemon.connect();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool forked = ask_status(*session).status().code() == POLYKV_ERR_FORKED;
    polykv_daemon_status status{};
    const bool forked_too = read_daemon_status(*session, status).code() == POLYKV_ERR_FORKED;
    session->close();
    session.reset();
    ::_exit(forked && forked_too ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  auto exchange = ask_status(*session);
  daemon.send_status(exchange->id(), 3);
  CHECK(pid_of(exchange->next(soon())) == 3);
}

TEST_CASE("closing ends the connection although a forked child holds a copy of the socket") {
  FakeDaemon daemon;
  auto session = daemon.connect();
  int hold[2];
  REQUIRE(::pipe(hold) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(hold[1]);
    char byte = 0;
    static_cast<void>(::read(hold[0], &byte, 1));  // until the parent is done
    ::_exit(0);
  }
  ::close(hold[0]);
  session.reset();
  CHECK(daemon.receive().packet == nullptr);
  ::close(hold[1]);
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
}

TEST_CASE("the environment's socket comes before the usual places") {
  REQUIRE(::setenv("POLYKV_SOCKET", "/nowhere/polykv.sock", 1) == 0);
  CHECK(default_socket_paths() == std::vector<std::string>{"/nowhere/polykv.sock"});
  const auto session = Session::connect({});
  CHECK(session.status().code() == POLYKV_ERR_DAEMON_UNREACHABLE);
  CHECK(session.status().message().find("/nowhere/polykv.sock") != std::string::npos);
  ::unsetenv("POLYKV_SOCKET");
  ::setenv("XDG_RUNTIME_DIR", "/nowhere", 1);
  CHECK(default_socket_paths() ==
        std::vector<std::string>{"/nowhere/polykv/polykv.sock", "/run/polykv/polykv.sock"});
}
