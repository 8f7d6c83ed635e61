// Clients and daemon that die: what is reclaimed, what stays charged, what nobody ever sees.
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdio>
#include <optional>
#include <sstream>

#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

struct Counts {
  uint64_t stored_bytes, retiring_bytes, documents, segments, leases, sessions;
};

/// What a client sees that connects now. Whatever happened to other sockets before is an event that
/// the daemon takes before this client's Hello, so the counts include it.
Counts counts_now(const DaemonProcess& daemon) {
  RawClient client(daemon.socket_path());
  const Reply reply = client.status();
  const auto& status = reply.as<wire::StatusReply>();
  return {status.stored_bytes(),  status.retiring_bytes(), status.document_count(),
          status.segment_count(), status.lease_count(),    status.session_count() - 1};
}

/// The two ways of knowing a peer's process: by the kernel, and by the pidfd that the client sends.
std::vector<std::string> pidfd_flags() {
  return {"--peer-pidfd", GENERATE(as<std::string>(), "auto", "client")};
}

}  // namespace

TEST_CASE(
    "a killed idle client's leases are gone with the next event, and the accounting is exact") {
  DaemonProcess daemon(pidfd_flags());
  const TestDocument document;
  RawClient(daemon.socket_path()).publish(document, "text");
  const uint64_t bytes = document.segment_bytes(0, document.tokens.size());
  ChildProcess reader([&](const Channel& parent) {
    RawClient client(daemon.socket_path());
    const auto leased = client.lease("text");
    parent.say("leased");
    parent.hear();
  });
  REQUIRE(reader.hear() == "leased");
  CHECK(counts_now(daemon).leases == 1);

  const auto killed = std::chrono::steady_clock::now();
  reader.kill();
  const Counts counts = counts_now(daemon);
  const std::chrono::duration<double, std::milli> latency =
      std::chrono::steady_clock::now() - killed;
  std::printf("lease of a killed client gone after %.1f ms (target 100 ms)\n", latency.count());
  CHECK(counts.leases == 0);
  CHECK(counts.sessions == 0);
  CHECK(counts.stored_bytes == bytes);
  CHECK(counts.retiring_bytes == 0);
  CHECK(RawClient(daemon.socket_path()).remove("text").code() == POLYKV_OK);
  CHECK(counts_now(daemon).stored_bytes == 0);
  CHECK(counts_now(daemon).segments == 0);
}

TEST_CASE("a producer killed in the middle leaves what it committed, for the next one alone") {
  DaemonProcess daemon(pidfd_flags());
  const TestDocument document;
  ChildProcess producer([&](const Channel& parent) {
    RawClient client(daemon.socket_path());
    const wire::Handle ticket = client.become_producer(document, "text");
    const Reply first = client.reserve(ticket, 0, 256);
    RawClient::fill(first, document, 0, 256);
    client.commit(*first.as<wire::SegmentReserved>().segment());
    const Reply second = client.reserve(ticket, 256, 44);
    const Mapping mapping =
        take(Mapping::map(second.received.fds.at(0).get(),
                          second.as<wire::SegmentReserved>().size_bytes(), MapAccess::read_write));
    parent.say("half");
    parent.hear();
  });
  REQUIRE(producer.hear() == "half");
  AcquireFields by_name;
  by_name.name = "text";
  RawClient reader(daemon.socket_path());
  CHECK(reader.acquire(by_name).code() == POLYKV_ERR_BUSY);
  CHECK(reader.list().as<wire::Listing>().documents()->size() == 0);
  CHECK(counts_now(daemon).segments == 2);

  producer.kill();
  const Counts counts = counts_now(daemon);
  CHECK(counts.documents == 0);
  CHECK(counts.segments == 1);
  CHECK(counts.stored_bytes == document.segment_bytes(0, 256));
  CHECK(counts.retiring_bytes == 0);
  CHECK(reader.acquire(by_name).code() == POLYKV_ERR_NOT_FOUND);
  CHECK(reader.acquire({}, &document).code() == POLYKV_ERR_NOT_FOUND);
  CHECK(reader.remove("text").code() == POLYKV_OK);
  CHECK(counts_now(daemon).stored_bytes == 0);
}

TEST_CASE("a producer killed between reservation and commit loses its segment") {
  DaemonProcess daemon;
  const TestDocument document;
  ChildProcess producer([&](const Channel& parent) {
    RawClient client(daemon.socket_path());
    const wire::Handle ticket = client.become_producer(document);
    const Reply reserved = client.reserve(ticket, 0, 300);
    (void)reserved.as<wire::SegmentReserved>();
    parent.say("reserved");
    parent.hear();
  });
  REQUIRE(producer.hear() == "reserved");
  CHECK(counts_now(daemon).stored_bytes == document.segment_bytes(0, 300));
  producer.kill();
  CHECK(counts_now(daemon).segments == 0);
  CHECK(counts_now(daemon).stored_bytes == 0);
}

TEST_CASE("what a producer may still write to stays charged while it lives, whatever it closed") {
  DaemonProcess daemon(pidfd_flags());
  const TestDocument document;
  ChildProcess producer([&](const Channel& parent) {
    RawClient client(daemon.socket_path());
    const Reply reserved = client.reserve(client.become_producer(document), 0, 300);
    const Mapping mapping = take(Mapping::map(reserved.received.fds.at(0).get(),
                                              reserved.as<wire::SegmentReserved>().size_bytes(),
                                              MapAccess::read_write));
    client.close();
    parent.say("closed");
    parent.hear();
  });
  REQUIRE(producer.hear() == "closed");
  const Counts counts = counts_now(daemon);
  CHECK(counts.sessions == 0);
  CHECK(counts.stored_bytes == 0);
  CHECK(counts.retiring_bytes == document.segment_bytes(0, 300));
  producer.kill();
  CHECK(counts_now(daemon).retiring_bytes == 0);
}

TEST_CASE("the parent's death ends its leases although a forked child holds the socket") {
  DaemonProcess daemon(pidfd_flags());
  RawClient(daemon.socket_path()).publish(TestDocument(), "text");
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd mine(ends[0]);
  UniqueFd grandchilds(ends[1]);
  ChildProcess parent([&](const Channel& test) {
    RawClient client(daemon.socket_path());
    const auto leased = client.lease("text");
    if (fork() == 0) {
      // Holds the socket, learns that it was shut down, and ends with the test.
      const bool closed = client.is_closed_by_daemon();
      Channel(grandchilds.get()).say(closed ? "closed" : "open");
      _exit(0);
    }
    test.say("forked");
    test.hear();
  });
  REQUIRE(parent.hear() == "forked");
  grandchilds.reset();
  CHECK(counts_now(daemon).leases == 1);
  parent.kill();
  CHECK(counts_now(daemon).leases == 0);
  CHECK(counts_now(daemon).sessions == 0);
  CHECK(Channel(mine.get()).hear() == "closed");
}

TEST_CASE("a process that got a dead client's PID inherits nothing") {
  if (geteuid() != 0) {
    WARN("skipped: only root may choose a PID");
    return;
  }
  DaemonProcess daemon(pidfd_flags());
  const TestDocument document;
  const uint64_t bytes = document.segment_bytes(0, document.tokens.size());
  RawClient keeper(daemon.socket_path());
  keeper.publish(document, "text");
  // A grandchild keeps the dead client's socket open: only the pidfd tells that it is dead.
  ChildProcess first([&](const Channel& parent) {
    RawClient client(daemon.socket_path());
    const auto leased = client.lease("text");
    const wire::Handle& lease = leased.lease;
    if (fork() == 0) {
      client.is_closed_by_daemon();
      _exit(0);
    }
    parent.say(std::to_string(lease.slot()) + " " + std::to_string(lease.generation()));
    parent.hear();
  });
  uint32_t slot = 0;
  uint32_t generation = 0;
  std::istringstream(first.hear()) >> slot >> generation;
  const pid_t pid = first.pid();
  // While the daemon sleeps, all of it happens: it sees the old process' death and the new one's
  // connection at once, and the connection first, since an earlier one made the socket readable.
  const bool sleeps = GENERATE(false, true);
  std::optional<RawClient> earlier;
  if (sleeps) {
    daemon.signal(SIGSTOP);
    earlier.emplace(daemon.socket_path(), false);
  }
  first.kill();
  ChildProcess second(
      [&](const Channel& parent) {
        RawClient client(daemon.socket_path(), false);
        parent.say("connected");
        parent.hear();
        client.shake_hands();
        if (client.release({client.epoch(), slot, generation}).code() != POLYKV_ERR_STALE)
          throw std::runtime_error("it released its predecessor's lease");
        const auto leased = client.lease("text");
        parent.say("leased");
        parent.hear();
        if (client.release(leased.lease).code() != POLYKV_OK)
          throw std::runtime_error("its own lease went with its predecessor");
      },
      pid);
  REQUIRE(second.pid() == pid);
  REQUIRE(second.hear() == "connected");
  daemon.signal(SIGCONT);
  second.say("go on");
  REQUIRE(second.hear() == "leased");
  CHECK(counts_now(daemon).leases == 1);
  // What the dead one held is not charged to the one that has its PID now.
  keeper.remove("text");
  CHECK(counts_now(daemon).retiring_bytes == bytes);
  second.say("go on");
  CHECK(second.succeeds());
  CHECK(counts_now(daemon).retiring_bytes == 0);
  CHECK(counts_now(daemon).leases == 0);
}

TEST_CASE(
    "a lease that was released twice, or of another connection, is stale and changes nothing") {
  DaemonProcess daemon;
  RawClient first(daemon.socket_path());
  first.publish(TestDocument(), "text");
  const auto released = first.lease("text");
  const auto kept = first.lease("text");
  CHECK(first.release(released.lease).code() == POLYKV_OK);
  CHECK(first.release(released.lease).code() == POLYKV_ERR_STALE);
  RawClient second(daemon.socket_path());
  CHECK(second.release(kept.lease).code() == POLYKV_ERR_STALE);
  const wire::Handle next_generation(kept.lease.epoch(), kept.lease.slot(),
                                     kept.lease.generation() + 1);
  CHECK(first.release(next_generation).code() == POLYKV_ERR_STALE);
  CHECK(counts_now(daemon).leases == 1);
  CHECK(first.release(kept.lease).code() == POLYKV_OK);
}

TEST_CASE("a killed daemon hangs up, and what was mapped stays readable", "[memfd]") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  client.publish(TestDocument(), "text");
  const auto leased = client.lease("text");
  const Mapping mapping =
      take(Mapping::map(leased.fds[0].get(), leased.sizes_bytes[0], MapAccess::read_only));
  daemon.kill();
  CHECK(client.is_closed_by_daemon());
  CHECK_OK(take(SegmentView::open(mapping.bytes())).verify_checksums());
}

TEST_CASE("a handle of an earlier daemon is stale in the next one") {
  DaemonProcess daemon;
  wire::Handle lease;
  wire::Handle ticket;
  {
    RawClient client(daemon.socket_path());
    client.publish(TestDocument(), "text");
    lease = client.lease("text").lease;
    ticket = client.become_producer(document_number(2));
  }
  daemon.kill();
  daemon.restart();
  RawClient client(daemon.socket_path());
  CHECK(client.epoch() != lease.epoch());
  client.publish(document_number(3), "text");
  const auto fresh = client.lease("text");
  CHECK(fresh.lease.slot() == lease.slot());
  const Reply reply = client.release(lease);
  CHECK(reply.code() == POLYKV_ERR_STALE);
  CHECK(reply.message().find("earlier polykvd") != std::string::npos);
  CHECK(client.reserve(ticket, 0, 300).code() == POLYKV_ERR_STALE);
  CHECK(counts_now(daemon).leases == 1);
}

TEST_CASE("a removed document stays charged to its reader until it lets go or is gone") {
  DaemonProcess daemon;
  const TestDocument document;
  const uint64_t bytes = document.segment_bytes(0, 300);
  RawClient client(daemon.socket_path());
  client.publish(document, "text");
  SECTION("it releases") {
    const auto leased = client.lease("text");
    CHECK(client.remove("text").code() == POLYKV_OK);
    AcquireFields by_name;
    by_name.name = "text";
    CHECK(client.acquire(by_name).code() == POLYKV_ERR_NOT_FOUND);
    const Reply page = client.list();
    REQUIRE(page.as<wire::Listing>().documents()->size() == 1);
    CHECK(page.as<wire::Listing>().documents()->Get(0)->state()->str() == "retiring");
    CHECK(counts_now(daemon).retiring_bytes == bytes);
    client.release(leased.lease);
    CHECK(counts_now(daemon).retiring_bytes == 0);
    CHECK(client.list().as<wire::Listing>().documents()->size() == 0);
  }
  SECTION("it closes its connection, and dies later") {
    ChildProcess reader([&](const Channel& parent) {
      RawClient own(daemon.socket_path());
      const auto leased = own.lease("text");
      own.close();
      parent.say("closed");
      parent.hear();
    });
    REQUIRE(reader.hear() == "closed");
    CHECK(counts_now(daemon).leases == 0);
    client.remove("text");
    CHECK(counts_now(daemon).retiring_bytes == bytes);
    reader.kill();
    CHECK(counts_now(daemon).retiring_bytes == 0);
  }
}

TEST_CASE("hundreds of clients killed with a lease leave no descriptor behind") {
  DaemonProcess daemon(pidfd_flags());
  RawClient(daemon.socket_path()).publish(TestDocument(), "text");
  const auto round = [&] {
    ChildProcess client([&](const Channel& parent) {
      RawClient own(daemon.socket_path());
      const auto leased = own.lease("text");
      parent.say("leased");
      parent.hear();
    });
    REQUIRE(client.hear() == "leased");
    client.kill();
  };
  round();
  CHECK(counts_now(daemon).leases == 0);
  const size_t before = daemon.open_descriptor_count();
  for (int i = 0; i < 200; ++i) round();
  CHECK(counts_now(daemon).leases == 0);
  counts_now(daemon);  // the connection of the one before is gone as well
  CHECK(daemon.open_descriptor_count() <= before + 2);
}
