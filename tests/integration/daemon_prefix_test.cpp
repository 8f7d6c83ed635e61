// Prefixes that documents share: what is stored once, who waits for whom, what an extension needs.
#include <catch2/catch.hpp>
#include <memory>

#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

AcquireFields producing(const std::string& name = "") {
  AcquireFields fields;
  fields.may_produce = true;
  fields.wait = true;
  fields.publish_name = name;
  return fields;
}

/// A document whose first `shared` tokens are those of every other one with this number of them.
TestDocument sharing(uint64_t shared, uint64_t token_count, uint32_t number) {
  TestDocument document;
  document.tokens = test_ids(token_count);
  for (uint64_t i = shared; i < token_count; ++i) document.tokens[i] += 1000 * number;
  return document;
}

uint64_t stored_bytes(RawClient& client) {
  const Reply reply = client.status();
  return reply.as<wire::StatusReply>().stored_bytes();
}
uint64_t committed_tokens(RawClient& client) {
  const Reply reply = client.status();
  return reply.as<wire::StatusReply>().tokens_committed_total();
}

/// Produces what is missing in one segment; returns the first token that was.
uint64_t finish(RawClient& client, const Reply& granted, const TestDocument& document) {
  const auto& ticket = granted.as<wire::TicketGranted>();
  const uint64_t first = ticket.next_token();
  client.publish_segment(*ticket.ticket(), document, first, document.tokens.size() - first);
  return first;
}

Digest digest_of(const TestDocument& document) {
  return chain_digests(chain_root(document.model), document.tokens).back();
}

struct Use {
  uint64_t first_token, token_count;
  bool operator==(const Use&) const = default;
};

/// How a lease uses segments.
std::vector<Use> uses_of(RawClient& client, uint64_t request_id) {
  const Reply granted = client.receive(request_id);
  std::vector<Use> uses;
  while (uses.size() < granted.as<wire::LeaseGranted>().segment_count()) {
    const Reply event = client.receive(request_id);
    for (const wire::SegmentInfo* info : *event.as<wire::LeaseSegments>().segments())
      uses.push_back({info->first_token(), info->token_count()});
    client.acknowledge(*granted.as<wire::LeaseGranted>().lease(),
                       static_cast<uint32_t>(uses.size()));
  }
  return uses;
}

}  // namespace

TEST_CASE("a second document stores only what the first does not have, in steps of 256 tokens") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument first = sharing(1000, 1500, 1);
  const TestDocument second = sharing(1000, 1400, 2);
  client.publish(first, "first", 512);
  const uint64_t before = stored_bytes(client);
  CHECK(finish(client, client.acquire(producing("second"), &second), second) == 768);
  CHECK(stored_bytes(client) == before + second.segment_bytes(768, 632));
  CHECK(committed_tokens(client) == 1500 + 632);
  CHECK(uses_of(client, client.send_acquire({}, &second)) ==
        std::vector<Use>{{0, 512}, {512, 256}, {768, 632}});
  CHECK(uses_of(client, client.send_acquire({}, &first)) ==
        std::vector<Use>{{0, 512}, {512, 512}, {1024, 476}});
  SECTION("what both use stays until both are gone") {
    client.remove("first");
    // The lease of this process holds what it was sent.
    RawClient other(daemon.socket_path());
    CHECK(uses_of(other, other.send_acquire({}, &second)).size() == 3);
    CHECK(stored_bytes(client) ==
          before + second.segment_bytes(768, 632) - first.segment_bytes(1024, 476));
    client.remove("second");
    CHECK(stored_bytes(client) == 0);
  }
  SECTION("a third continues the second") {
    TestDocument third = second;
    third.tokens.resize(2000, 7);
    CHECK(finish(client, client.acquire(producing(), &third), third) == 1280);
    CHECK(uses_of(client, client.send_acquire({}, &third)) ==
          std::vector<Use>{{0, 512}, {512, 256}, {768, 512}, {1280, 720}});
  }
  SECTION("another profile, model or user shares nothing") {
    TestDocument other = second;
    SECTION("profile") {
      other.profile = Profile::exact;
    }
    SECTION("fingerprint") {
      other.model.fingerprint[3] ^= 1;
    }
    SECTION("geometry") {
      other.model.layers[1].kv_head_count = 2;
    }
    SECTION("RoPE") {
      other.model.rope.theta += 1;
    }
    SECTION("dtype") {
      other.model.source_dtype = Dtype::bf16;
    }
    const Reply granted = client.acquire(producing(), &other);
    CHECK(granted.as<wire::TicketGranted>().next_token() == 0);
  }
}

TEST_CASE("tokens that sealed segments hold are a document, wherever they end") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument whole = sharing(1500, 1500, 0);
  client.publish(whole, "whole", 512);
  const uint64_t before = stored_bytes(client);
  const uint64_t count = GENERATE(as<uint64_t>(), 1, 255, 256, 300, 512, 513, 1024, 1100, 1499);
  const TestDocument part = sharing(1500, count, 0);
  uint64_t tokens = 0;
  for (const Use& use : uses_of(client, client.send_acquire({}, &part))) {
    CHECK(use.first_token == tokens);
    tokens += use.token_count;
  }
  CHECK(tokens == count);
  AcquireFields by_digest;
  by_digest.digest = digest_of(part);
  CHECK(client.acquire(by_digest).code() == POLYKV_ERR_NOT_FOUND);  // it was for that lease alone
  // For a producer it is one that can be found, though it stores nothing.
  CHECK(client.take_lease(client.send_acquire(producing("part"), &part)).fds.size() > 0);
  CHECK(client.lease("part").fds.size() > 0);
  CHECK(stored_bytes(client) == before);
  CHECK(committed_tokens(client) == 1500);
  TestDocument other = part;
  other.tokens.back() += 1;
  CHECK(client.acquire({}, &other).code() == POLYKV_ERR_NOT_FOUND);
}

TEST_CASE("eight acquires of two texts that share a prefix commit exactly the union") {
  DaemonProcess daemon;
  const TestDocument first = sharing(5000, 7639, 1);
  const TestDocument second = sharing(5000, 6000, 2);
  std::vector<std::unique_ptr<RawClient>> clients;
  std::vector<uint64_t> ids;
  wire::Handle ticket;
  const auto document_of = [&](size_t i) -> const TestDocument& { return i < 6 ? first : second; };
  for (size_t i = 0; i < 8; ++i) {
    clients.push_back(std::make_unique<RawClient>(daemon.socket_path()));
    ids.push_back(clients[i]->send_acquire(producing(), &document_of(i)));
    if (i == 0) {
      const Reply granted = clients[0]->receive(ids[0]);
      ticket = *granted.as<wire::TicketGranted>().ticket();
    } else {
      clients[i]->status();  // it waits
    }
  }
  clients[0]->publish_segment(ticket, first, 0, 4096);
  // The second text waits: 4,864 of its tokens are about to be sealed, not 4,096.
  clients[0]->publish_segment(ticket, first, 4096, 7639 - 4096);
  CHECK(finish(*clients[6], clients[6]->receive(ids[6]), second) == 4864);
  for (const size_t i : {1, 2, 3, 4, 5, 7}) CHECK(!clients[i]->take_lease(ids[i]).fds.empty());
  CHECK(committed_tokens(*clients[0]) == 7639 + 6000 - 4864);
  CHECK(stored_bytes(*clients[0]) == first.segment_bytes(0, 4096) +
                                         first.segment_bytes(4096, 7639 - 4096) +
                                         second.segment_bytes(4864, 6000 - 4864));
}

TEST_CASE("who waits for a prefix goes on when its producer is lost, or when it is cancelled") {
  DaemonProcess daemon;
  const TestDocument first = sharing(1000, 1500, 1);
  const TestDocument second = sharing(1000, 1500, 2);
  auto producer = std::make_unique<RawClient>(daemon.socket_path());
  const wire::Handle ticket = producer->become_producer(first);
  producer->publish_segment(ticket, first, 0, 512);
  RawClient waiter(daemon.socket_path());
  const uint64_t id = waiter.send_acquire(producing(), &second);
  waiter.status();
  SECTION("lost") {
    producer.reset();
    CHECK(finish(waiter, waiter.receive(id), second) == 512);
  }
  SECTION("cancelled") {
    flatbuffers::FlatBufferBuilder builder;
    const uint64_t cancel_id = waiter.send(builder, wire::CreateCancel(builder, id));
    CHECK(waiter.receive(id).code() == POLYKV_ERR_CANCELLED);
    CHECK(waiter.receive(cancel_id).code() == POLYKV_OK);
    producer->publish_segment(ticket, first, 512, 988);
  }
  SECTION("it does not wait at all, and computes what is not there yet") {
    RawClient other(daemon.socket_path());
    AcquireFields fields = producing();
    fields.wait = false;
    CHECK(finish(other, other.acquire(fields, &second), second) == 512);
  }
}

TEST_CASE("what a lost producer sealed is continued by the next, and costs only the rest") {
  DaemonProcess daemon;
  const TestDocument document = sharing(2000, 2000, 0);
  auto producer = std::make_unique<RawClient>(daemon.socket_path());
  const wire::Handle ticket = producer->become_producer(document, "text");
  producer->publish_segment(ticket, document, 0, 300);  // off every boundary
  producer->publish_segment(ticket, document, 300, 700);
  producer->reserve(ticket, 1000, 1000);
  producer.reset();

  RawClient client(daemon.socket_path());
  const Reply listing = client.list();
  REQUIRE(listing.as<wire::Listing>().documents()->size() == 1);
  const wire::DocumentInfo& info = *listing.as<wire::Listing>().documents()->Get(0);
  CHECK(info.state()->str() == "incomplete");
  CHECK(info.sealed_token_count() == 1000);
  CHECK(info.token_count() == 2000);
  CHECK(client.acquire({}, &document).code() == POLYKV_ERR_NOT_FOUND);
  SECTION("continued") {
    CHECK(finish(client, client.acquire(producing("text"), &document), document) == 1000);
    CHECK(committed_tokens(client) == 2000);
    CHECK(uses_of(client, client.send_acquire({}, &document)) ==
          std::vector<Use>{{0, 300}, {300, 700}, {1000, 1000}});
  }
  SECTION("shared by another text") {
    const TestDocument other = sharing(900, 1000, 3);
    CHECK(finish(client, client.acquire(producing(), &other), other) == 768);
  }
  SECTION("removed") {
    CHECK(client.remove("text").code() == POLYKV_OK);
    CHECK(client.remove("text").code() == POLYKV_ERR_NOT_FOUND);
    CHECK(stored_bytes(client) == 0);
  }
}

TEST_CASE("an incomplete document is evicted like any other") {
  const TestDocument document = sharing(600, 600, 0);
  DaemonProcess daemon({"--budget", std::to_string(document.segment_bytes(0, 600))});
  auto producer = std::make_unique<RawClient>(daemon.socket_path());
  producer->publish_segment(producer->become_producer(document), document, 0, 300);
  producer.reset();
  RawClient client(daemon.socket_path());
  const TestDocument other = sharing(0, 600, 5);
  client.publish(other, "other");
  CHECK(stored_bytes(client) == other.segment_bytes(0, 600));
}

TEST_CASE("an extension begins at the very end of what it extends") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  TestDocument text = sharing(7639, 7639, 0);
  client.publish(text, "text");
  const auto reader = client.lease("text");
  uint64_t expected = stored_bytes(client);
  for (int i = 0; i < 4; ++i) {
    AcquireFields fields = producing("text");
    fields.replace_name = true;
    fields.extends = digest_of(text);
    const uint64_t end = text.tokens.size();
    text.tokens.resize(end + 100, 3);
    CHECK(finish(client, client.acquire(fields, &text), text) == end);
    expected += text.segment_bytes(end, 100);
  }
  CHECK(text.tokens.size() == 8039);
  CHECK(stored_bytes(client) == expected);
  CHECK(committed_tokens(client) == 8039);
  CHECK(uses_of(client, client.send_acquire({}, &text)).size() == 6);
  CHECK(client.lease("text").fds.size() == 6);
  // The chunk of tokens 7,680 to 7,935 spans segments, and is found nevertheless.
  TestDocument longer = text;
  longer.tokens.resize(9000, 4);
  const Reply granted = client.acquire(producing(), &longer);
  CHECK(granted.as<wire::TicketGranted>().next_token() == 7936);
  // The old lease: its segments are there and verify.
  if (TestDevice::is_wanted()) return;  // their payloads are in device memory
  for (size_t i = 0; i < reader.fds.size(); ++i) {
    const Mapping mapping =
        take(Mapping::map(reader.fds[i].get(), reader.sizes_bytes[i], MapAccess::read_only));
    CHECK_OK(take(SegmentView::open(mapping.bytes())).verify_checksums());
  }
}

TEST_CASE("an extension of what is not there, not a prefix, or one segment by design is refused") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  TestDocument text = sharing(600, 600, 0);
  text.profile = GENERATE(Profile::k8v8, Profile::paper_k8v3);
  client.publish(text, "text");
  AcquireFields fields = producing();
  fields.extends = digest_of(text);
  TestDocument longer = text;
  longer.tokens.resize(700, 3);
  if (text.profile == Profile::paper_k8v3) {
    const Reply refused = client.acquire(fields, &longer);
    CHECK(refused.code() == POLYKV_ERR_UNSUPPORTED);
    CHECK(refused.message().find("paper-k8v3 is one segment") != std::string::npos);
    // Without saying so it is computed whole.
    const Reply granted = client.acquire(producing(), &longer);
    CHECK(granted.as<wire::TicketGranted>().next_token() == 0);
    return;
  }
  TestDocument other = longer;
  other.tokens[5] += 1;
  CHECK(client.acquire(fields, &other).code() == POLYKV_ERR_INVALID_ARGUMENT);
  other = longer;
  other.model.fingerprint[0] ^= 1;
  CHECK(client.acquire(fields, &other).code() == POLYKV_ERR_INVALID_ARGUMENT);
  fields.extends = digest_of(longer);
  CHECK(client.acquire(fields, &longer).code() == POLYKV_ERR_NOT_FOUND);
}

TEST_CASE("a producer leases what is sealed before its part, whatever happens to whose it was") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument first = sharing(600, 600, 0);
  client.publish(first, "first", 300);
  const TestDocument second = sharing(600, 1000, 0);
  const Reply granted = client.acquire(producing(), &second);
  const wire::Handle ticket = *granted.as<wire::TicketGranted>().ticket();
  CHECK(granted.as<wire::TicketGranted>().next_token() == 512);
  client.remove("first");
  const Reply leased = client.acquire_sealed(ticket);
  CHECK(leased.as<wire::LeaseGranted>().document()->token_count() == 512);
  const Reply event = client.receive(leased.id());
  REQUIRE(event.as<wire::LeaseSegments>().segments()->size() == 2);
  CHECK(event.as<wire::LeaseSegments>().segments()->Get(1)->token_count() == 212);
  client.release(*leased.as<wire::LeaseGranted>().lease());
  client.publish_segment(ticket, second, 512, 488);
  RawClient other(daemon.socket_path());
  CHECK(other.acquire_sealed(ticket).code() == POLYKV_ERR_STALE);
  CHECK(client.acquire_sealed(ticket).code() == POLYKV_ERR_STALE);
  const TestDocument fresh = sharing(0, 300, 9);
  CHECK(client.acquire_sealed(client.become_producer(fresh)).code() == POLYKV_ERR_NOT_FOUND);
}

TEST_CASE("who produces something does not wait for a prefix, which might be its own") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument first = sharing(600, 1000, 1);
  const TestDocument second = sharing(600, 1000, 2);
  const wire::Handle ticket = client.become_producer(first);
  client.publish_segment(ticket, first, 0, 256);
  CHECK(finish(client, client.acquire(producing(), &second), second) == 256);
  client.publish_segment(ticket, first, 256, 744);
}

TEST_CASE("what is sealed of a flight is one view, however often it is leased") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document = sharing(600, 600, 0);
  const wire::Handle ticket = client.become_producer(document);
  client.publish_segment(ticket, document, 0, 300);
  std::vector<wire::Handle> leases;
  for (int i = 0; i < 5; ++i) {
    const Reply granted = client.acquire_sealed(ticket);
    leases.push_back(*granted.as<wire::LeaseGranted>().lease());
    (void)client.receive(granted.id());
    CHECK(granted.as<wire::LeaseGranted>().document()->lease_count() ==
          static_cast<uint32_t>(i + 1));
  }
  client.publish_segment(ticket, document, 300, 300);
  for (const wire::Handle& lease : leases) CHECK(client.release(lease).code() == POLYKV_OK);
  CHECK(stored_bytes(client) == document.segment_bytes(0, 300) + document.segment_bytes(300, 300));
}
