// Compute once: who produces, who waits, and what happens when the producer is lost.
#include <poll.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <memory>

#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"

using namespace polykv;
using namespace polykv::test;

namespace {

AcquireFields producing() {
  AcquireFields fields;
  fields.may_produce = true;
  fields.wait = true;
  return fields;
}

AcquireFields waiting(int64_t timeout_ms = -1) {
  AcquireFields fields;
  fields.wait = true;
  fields.timeout_ms = timeout_ms;
  return fields;
}

/// Whether a packet is there before the time is over.
bool hears_within(const RawClient& client, int time_ms) {
  pollfd entry{client.socket(), POLLIN, 0};
  return poll(&entry, 1, time_ms) > 0;
}

void publish_with(RawClient& client, const wire::Handle& ticket, const TestDocument& document) {
  const Reply reserved = client.reserve(ticket, 0, document.tokens.size());
  RawClient::fill(reserved, document, 0, document.tokens.size());
  REQUIRE(client.commit(*reserved.as<wire::SegmentReserved>().segment()).code() == POLYKV_OK);
}

}  // namespace

TEST_CASE("of eight simultaneous acquires one produces, and all get the one document") {
  DaemonProcess daemon;
  const TestDocument document;
  std::vector<std::unique_ptr<RawClient>> clients;
  std::vector<uint64_t> ids;
  for (int i = 0; i < 8; ++i) clients.push_back(std::make_unique<RawClient>(daemon.socket_path()));
  for (const auto& client : clients) ids.push_back(client->send_acquire(producing(), &document));
  // Exactly one is answered: whichever it is.
  std::vector<pollfd> entries;
  for (const auto& client : clients) entries.push_back({client->socket(), POLLIN, 0});
  REQUIRE(poll(entries.data(), entries.size(), 60'000) == 1);
  size_t producer = 0;
  while ((entries[producer].revents & POLLIN) == 0) ++producer;
  const Reply granted = clients[producer]->receive(ids[producer]);
  const wire::Handle ticket = *granted.as<wire::TicketGranted>().ticket();
  CHECK(granted.as<wire::TicketGranted>().next_token() == 0);
  CHECK(granted.as<wire::TicketGranted>().token_count() == 300);
  publish_with(*clients[producer], ticket, document);
  for (size_t i = 0; i < clients.size(); ++i) {
    if (i != producer) CHECK(clients[i]->take_lease(ids[i]).fds.size() == 1);
  }
  const Reply status = clients[producer]->status();
  CHECK(status.as<wire::StatusReply>().tokens_committed_total() == 300);
  CHECK(status.as<wire::StatusReply>().document_count() == 1);
  CHECK(status.as<wire::StatusReply>().lease_count() == 7);
}

TEST_CASE("who does not wait is told that somebody produces it") {
  DaemonProcess daemon;
  const TestDocument document;
  RawClient producer(daemon.socket_path());
  producer.become_producer(document, "text");
  RawClient other(daemon.socket_path());
  CHECK(other.acquire({}, &document).code() == POLYKV_ERR_BUSY);
  AcquireFields fields;
  fields.may_produce = true;
  CHECK(other.acquire(fields, &document).code() == POLYKV_ERR_BUSY);
  AcquireFields by_name;
  by_name.name = "text";
  CHECK(other.acquire(by_name).code() == POLYKV_ERR_BUSY);
  TestDocument other_profile = document;
  other_profile.profile = Profile::exact;
  CHECK(other.acquire({}, &other_profile).code() == POLYKV_ERR_NOT_FOUND);
}

TEST_CASE("a waiter by name gets the document when it is sealed") {
  DaemonProcess daemon;
  const TestDocument document;
  RawClient producer(daemon.socket_path());
  const wire::Handle ticket = producer.become_producer(document, "text");
  RawClient reader(daemon.socket_path());
  AcquireFields by_name = waiting();
  by_name.name = "text";
  const uint64_t id = reader.send_acquire(by_name);
  publish_with(producer, ticket, document);
  CHECK(reader.take_lease(id).fds.size() == 1);
}

TEST_CASE("a waiter's deadline passes") {
  DaemonProcess daemon;
  const TestDocument document;
  RawClient producer(daemon.socket_path());
  producer.become_producer(document);
  RawClient reader(daemon.socket_path());
  CHECK(reader.acquire(waiting(30), &document).code() == POLYKV_ERR_TIMEOUT);
}

TEST_CASE("a waiter is cancelled and told so, then the cancel is answered") {
  DaemonProcess daemon;
  const TestDocument document;
  RawClient producer(daemon.socket_path());
  producer.become_producer(document);
  RawClient reader(daemon.socket_path());
  const uint64_t id = reader.send_acquire(waiting(), &document);
  flatbuffers::FlatBufferBuilder builder;
  const uint64_t cancel_id = reader.send(builder, wire::CreateCancel(builder, id));
  CHECK(reader.receive(id).code() == POLYKV_ERR_CANCELLED);
  CHECK(reader.receive(cancel_id).code() == POLYKV_OK);
  CHECK(reader.cancel(12345).code() == POLYKV_OK);
}

TEST_CASE("when the producer's connection ends, the next waiter that may produce takes over") {
  DaemonProcess daemon;
  const TestDocument document;
  auto producer = std::make_unique<RawClient>(daemon.socket_path());
  const wire::Handle first_ticket = producer->become_producer(document, "text");
  const Reply first = producer->reserve(first_ticket, 0, 256);
  RawClient::fill(first, document, 0, 256);
  producer->commit(*first.as<wire::SegmentReserved>().segment());
  RawClient reader(daemon.socket_path());
  RawClient heir(daemon.socket_path());
  RawClient second_heir(daemon.socket_path());
  const uint64_t reader_id = reader.send_acquire(waiting(), &document);
  reader.status();  // so that it came first
  const uint64_t heir_id = heir.send_acquire(producing(), &document);
  heir.status();
  const uint64_t second_id = second_heir.send_acquire(producing(), &document);
  second_heir.status();
  producer.reset();

  const Reply granted = heir.receive(heir_id);
  CHECK(granted.as<wire::TicketGranted>().next_token() == 256);
  heir.publish_segment(*granted.as<wire::TicketGranted>().ticket(), document, 256, 44);
  CHECK(reader.take_lease(reader_id).fds.size() == 2);
  CHECK(second_heir.take_lease(second_id).fds.size() == 2);
}

TEST_CASE("when nobody takes over, a waiter learns that the producer is lost") {
  DaemonProcess daemon;
  const TestDocument document;
  auto producer = std::make_unique<RawClient>(daemon.socket_path());
  const wire::Handle ticket = producer->become_producer(document);
  RawClient reader(daemon.socket_path());
  const uint64_t id = reader.send_acquire(waiting(), &document);
  reader.status();
  SECTION("its connection ends") {
    producer.reset();
  }
  SECTION("it gives up") {
    CHECK(producer->ticket_abort(ticket).code() == POLYKV_OK);
  }
  CHECK(reader.receive(id).code() == POLYKV_ERR_PRODUCER_LOST);
  CHECK(reader.acquire({}, &document).code() == POLYKV_ERR_NOT_FOUND);
}

TEST_CASE("a producer that stalls loses its ticket, and what it says later is stale") {
  DaemonProcess daemon({"--stall-deadline", "100ms"});
  const TestDocument document;
  RawClient producer(daemon.socket_path());
  const wire::Handle ticket = producer.become_producer(document, "text");
  const Reply reserved = producer.reserve(ticket, 0, 300);
  RawClient heir(daemon.socket_path());
  const uint64_t id = heir.send_acquire(producing(), &document);
  const Reply granted = heir.receive(id);
  const wire::Handle heirs_ticket = *granted.as<wire::TicketGranted>().ticket();

  CHECK(producer.progress(ticket).code() == POLYKV_ERR_STALE);
  CHECK(producer.reserve(ticket, 0, 300).code() == POLYKV_ERR_STALE);
  CHECK(producer.ticket_abort(ticket).code() == POLYKV_ERR_STALE);
  const auto retiring = [&] {
    const Reply reply = producer.status();
    return reply.as<wire::StatusReply>().retiring_bytes();
  };
  CHECK(retiring() == document.segment_bytes(0, 300));
  {
    const Mapping mapping =
        take(Mapping::map(reserved.received.fds[0].get(), 4096, MapAccess::read_write));
    CHECK(producer.commit(*reserved.as<wire::SegmentReserved>().segment()).code() ==
          POLYKV_ERR_STALE);
    CHECK(retiring() == document.segment_bytes(0, 300));  // it is still mapped
  }
  CHECK(producer.segment_abort(*reserved.as<wire::SegmentReserved>().segment()).code() ==
        POLYKV_OK);
  CHECK(retiring() == 0);
  (void)heirs_ticket;
}

TEST_CASE("progress renews a ticket, a stopped producer then loses it", "[memfd]") {
  constexpr int kStallMs = 2000;
  DaemonProcess daemon({"--stall-deadline", std::to_string(kStallMs) + "ms"});
  const TestDocument document;
  RawClient producer(daemon.socket_path());
  const wire::Handle ticket = producer.become_producer(document);
  RawClient heir(daemon.socket_path());
  const uint64_t id = heir.send_acquire(producing(), &document);
  const auto begin = std::chrono::steady_clock::now();
  uint64_t tokens_done = 0;
  while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(kStallMs * 3 / 2)) {
    REQUIRE(producer.progress(ticket, ++tokens_done).code() == POLYKV_OK);
    CHECK(!hears_within(heir, 100));
  }
  const Reply granted = heir.receive(id);
  CHECK(granted.as<wire::TicketGranted>().next_token() == 0);
  CHECK(producer.progress(ticket).code() == POLYKV_ERR_STALE);
}

TEST_CASE("a commit renews a ticket", "[memfd]") {
  DaemonProcess daemon({"--stall-deadline", "2s"});
  TestDocument document = document_number(1, 256 * 3);
  RawClient producer(daemon.socket_path());
  const wire::Handle ticket = producer.become_producer(document, "text");
  RawClient reader(daemon.socket_path());
  AcquireFields by_name = waiting();
  by_name.name = "text";
  const uint64_t id = reader.send_acquire(by_name);
  for (uint64_t first = 0; first < 256 * 3; first += 256) {
    const Reply reserved = producer.reserve(ticket, first, 256);
    RawClient::fill(reserved, document, first, 256);
    // Two thirds of the deadline each: together twice the deadline.
    CHECK(!hears_within(reader, 1333));
    CHECK(producer.commit(*reserved.as<wire::SegmentReserved>().segment()).code() == POLYKV_OK);
  }
  CHECK(reader.take_lease(id).fds.size() == 3);
}

TEST_CASE("a long token list, which is hashed on another thread, is found as well") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  TestDocument document;
  document.model = test_model({{1, 64, 64, 0}});
  document.tokens = test_ids(40'000);
  client.publish(document, "long", 20'000);
  CHECK(client.take_lease(client.send_acquire({}, &document)).fds.size() == 2);
  document.tokens.back() += 1;
  CHECK(client.acquire({}, &document).code() == POLYKV_ERR_NOT_FOUND);
  // Given up while it is hashed or while it waits: both are answered.
  AcquireFields fields = producing();
  document.tokens.back() += 1;
  const uint64_t id = client.send_acquire(fields, &document);
  flatbuffers::FlatBufferBuilder builder;
  const uint64_t cancel_id = client.send(builder, wire::CreateCancel(builder, id));
  const Reply first = client.receive(id);
  CHECK((first.code() == POLYKV_ERR_CANCELLED || first.is(wire::Body::TicketGranted)));
  CHECK(client.receive(cancel_id).code() == POLYKV_OK);
}
