// Publishing and reading a document, at the level of packets.
#include <sys/stat.h>

#include <catch2/catch.hpp>

#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

TEST_CASE("a published document is found by name, by digest and by tokens, and reads the same") {
  DaemonProcess daemon;
  RawClient producer(daemon.socket_path());
  const TestDocument document;
  const Digest digest = producer.publish(document, "text", 256);

  RawClient reader(daemon.socket_path());
  AcquireFields by_name;
  by_name.name = "text";
  AcquireFields by_digest;
  by_digest.digest = digest;
  for (const uint64_t id : {reader.send_acquire(by_name), reader.send_acquire(by_digest)}) {
    const RawClient::LeasedDocument leased = reader.take_lease(id);
    REQUIRE(leased.fds.size() == 2);
    if (TestDevice::is_wanted()) continue;  // the rest is in device memory
    uint64_t next_token = 0;
    for (size_t i = 0; i < 2; ++i) {
      const Mapping mapping =
          take(Mapping::map(leased.fds[i].get(), leased.sizes_bytes[i], MapAccess::read_only));
      const SegmentView view = take(SegmentView::open(mapping.bytes()));
      CHECK_OK(view.verify_checksums());
      CHECK(view.first_token() == next_token);
      next_token += view.token_count();
    }
    CHECK(next_token == document.tokens.size());
  }
  const RawClient::LeasedDocument by_tokens = reader.take_lease(reader.send_acquire({}, &document));
  CHECK(by_tokens.fds.size() == 2);
}

TEST_CASE("the grant of a lease tells everything about the document") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document;
  const Digest digest = client.publish(document, "text");
  AcquireFields by_name;
  by_name.name = "text";
  const Reply reply = client.acquire(by_name);
  const wire::DocumentInfo& info = *reply.as<wire::LeaseGranted>().document();
  CHECK(info.names()->Get(0)->str() == "text");
  CHECK(from_wire(*info.digest()) == digest);
  CHECK(take(from_wire(*info.model())).layers == document.model.layers);
  CHECK(info.profile() == static_cast<uint32_t>(document.profile));
  CHECK(info.token_count() == document.tokens.size());
  CHECK(info.segment_count() == 1);
  CHECK(info.stored_bytes() == document.segment_bytes(0, document.tokens.size()));
  CHECK(info.bf16_bytes() == 300 * 2 * (2 * 128 + 1 * 128));
  CHECK(info.lease_count() == 1);
  CHECK(info.state()->str() == "sealed");
  CHECK(!info.is_public());
}

// ---- reserving and committing ----

TEST_CASE("segments are reserved in order, one at a time, within the document") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document;
  const wire::Handle ticket = client.become_producer(document);
  for (const auto& [first, count] : std::initializer_list<std::pair<uint64_t, uint64_t>>{
           {1, 10}, {0, 0}, {0, 301}, {0, UINT64_MAX}, {UINT64_MAX, 2}, {300, 1}}) {
    CHECK(client.reserve(ticket, first, count).code() == POLYKV_ERR_INVALID_ARGUMENT);
  }
  const Reply reserved = client.reserve(ticket, 0, 256);
  CHECK(reserved.code() == POLYKV_OK);
  CHECK(client.reserve(ticket, 256, 44).code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(client.segment_abort(*reserved.as<wire::SegmentReserved>().segment()).code() == POLYKV_OK);
  CHECK(client.reserve(ticket, 0, 300).code() == POLYKV_OK);
}

TEST_CASE("what a producer chose decides a reservation's size, and is checked") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  TestDocument document;
  document.profile = Profile::automatic;
  const wire::Handle ticket = client.become_producer(document);
  const auto reserve = [&](uint32_t rows, const std::vector<uint8_t>& profiles) {
    flatbuffers::FlatBufferBuilder builder;
    const auto body =
        wire::CreateSegmentReserveDirect(builder, &ticket, 0, 256, rows, true, &profiles);
    return client.receive(client.send(builder, body));
  };
  CHECK(reserve(0, {}).code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(reserve(0, {5}).code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(reserve(0, {5, 5, 5}).code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(reserve(0, {5, 8}).code() == POLYKV_ERR_UNSUPPORTED);
  CHECK(reserve(0, {2, 5}).code() == POLYKV_ERR_UNSUPPORTED);
  CHECK(reserve(0, {5, 255}).code() == POLYKV_ERR_UNSUPPORTED);
  CHECK(reserve(kMaxChosenExactRows + 1, {5, 5}).code() == POLYKV_ERR_LIMIT);
  const Reply reserved = reserve(2, {5, 1});
  REQUIRE(reserved.code() == POLYKV_OK);
  SegmentSpec spec = test_spec(document.model, Profile::automatic, 256);
  spec.layer_profiles = {Profile::k5v4, Profile::exact};
  spec.chosen_exact_rows = 2;
  spec.has_certificate = true;
  CHECK(reserved.as<wire::SegmentReserved>().size_bytes() == take(segment_size_bytes(spec)));

  const TestDocument other;  // of one profile
  const wire::Handle second = client.become_producer(other);
  const std::vector<uint8_t> profiles(2, 3);
  flatbuffers::FlatBufferBuilder builder;
  const auto body = wire::CreateSegmentReserveDirect(builder, &second, 0, 256, 0, false, &profiles);
  CHECK(client.receive(client.send(builder, body)).code() == POLYKV_ERR_INVALID_ARGUMENT);
}

TEST_CASE("a reservation tells size and digests, and its memory is there and fixed in size") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document;
  const std::vector<Digest> chain = chain_digests(chain_root(document.model), document.tokens);
  const wire::Handle ticket = client.become_producer(document);
  const Reply reply = client.reserve(ticket, 0, 300);
  const auto& reserved = reply.as<wire::SegmentReserved>();
  CHECK(reserved.size_bytes() == document.host_bytes(0, 300));
  CHECK(from_wire(*reserved.root_digest()) == chain_root(document.model));
  CHECK(from_wire(*reserved.parent_digest()) == chain_root(document.model));
  REQUIRE(reserved.digests()->size() == 2);
  CHECK(from_wire(*reserved.digests()->Get(1)) == chain[1]);
  REQUIRE(reply.received.fds.size() == 1);
  struct stat info;
  REQUIRE(fstat(reply.received.fds[0].get(), &info) == 0);
  CHECK(static_cast<uint64_t>(info.st_blocks) * 512 >= reserved.size_bytes());
  CHECK(ftruncate(reply.received.fds[0].get(), 0) == -1);
}

TEST_CASE("a segment that is still mapped can be committed again after unmapping") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document;
  const wire::Handle ticket = client.become_producer(document, "text");
  const Reply reply = client.reserve(ticket, 0, 300);
  const auto& reserved = reply.as<wire::SegmentReserved>();
  Mapping mapping =
      take(Mapping::map(reply.received.fds[0].get(), reserved.size_bytes(), MapAccess::read_write));
  RawClient::write_segment(reserved, document, 0, 300, mapping.writable_bytes());
  const Reply busy = client.commit(*reserved.segment());
  CHECK(busy.code() == POLYKV_ERR_BUSY);
  CHECK(busy.message().find("still mapped writable") != std::string::npos);
  mapping.reset();
  CHECK(client.commit(*reserved.segment()).code() == POLYKV_OK);
  CHECK(client.lease("text").fds.size() == 1);
}

TEST_CASE("a segment that fails verification is reclaimed, and the ticket may try again") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document;
  const wire::Handle ticket = client.become_producer(document, "text");
  const auto expect_refused = [&](const char* what, polykv_status code, auto damage) {
    INFO(what);
    const Reply reply = client.reserve(ticket, 0, 300);
    RawClient::fill(reply, document, 0, 300);
    damage(reply.received.fds[0].get());
    const wire::Handle segment = *reply.as<wire::SegmentReserved>().segment();
    CHECK(client.commit(segment).code() == code);
    CHECK(client.commit(segment).code() == POLYKV_ERR_STALE);
    const Reply status = client.status();
    CHECK(status.as<wire::StatusReply>().segment_count() == 0);
    CHECK(status.as<wire::StatusReply>().document_count() == 0);
  };
  expect_refused("seals of its own", POLYKV_ERR_INVALID_ARGUMENT,
                 [](int fd) { REQUIRE(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SEAL) == 0); });
  expect_refused("holes", POLYKV_ERR_CORRUPT, [](int fd) {
    REQUIRE(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0);
  });
  expect_refused("a flipped bit", POLYKV_ERR_CORRUPT, [](int fd) {
    uint8_t byte = 0;
    REQUIRE(pread(fd, &byte, 1, 5000) == 1);
    byte ^= 1;
    REQUIRE(pwrite(fd, &byte, 1, 5000) == 1);
  });
  const Reply reply = client.reserve(ticket, 0, 300);
  RawClient::fill(reply, document, 0, 300);
  CHECK(client.commit(*reply.as<wire::SegmentReserved>().segment()).code() == POLYKV_OK);
  CHECK(client.lease("text").fds.size() == 1);
}

TEST_CASE("what a producer sealed by itself while it is mapped stays charged until it lets go") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document;
  const Reply reply = client.reserve(client.become_producer(document), 0, 300);
  const auto& reserved = reply.as<wire::SegmentReserved>();
  const Mapping mapping =
      take(Mapping::map(reply.received.fds[0].get(), reserved.size_bytes(), MapAccess::read_write));
  REQUIRE(fcntl(reply.received.fds[0].get(), F_ADD_SEALS, F_SEAL_SEAL) == 0);
  CHECK(client.commit(*reserved.segment()).code() == POLYKV_ERR_INVALID_ARGUMENT);
  const Reply status = client.status();
  CHECK(status.as<wire::StatusReply>().retiring_bytes() == document.segment_bytes(0, 300));
}

TEST_CASE("a paper-k8v3 document is one segment, and an unknown codec has no producer") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  TestDocument paper;
  paper.profile = Profile::paper_k8v3;
  const wire::Handle ticket = client.become_producer(paper);
  CHECK(client.reserve(ticket, 0, 256).code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(client.reserve(ticket, 0, 300).code() == POLYKV_OK);
  AcquireFields fields;
  fields.may_produce = true;
  TestDocument unknown;
  unknown.profile = static_cast<Profile>(99);
  CHECK(client.acquire(fields, &unknown).code() == POLYKV_ERR_INVALID_ARGUMENT);
  TestDocument any;
  any.profile = Profile::any;
  CHECK(client.acquire(fields, &any).code() == POLYKV_ERR_INVALID_ARGUMENT);
}

TEST_CASE("a ticket that is given up leaves nothing, and its handles are stale") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document;
  const wire::Handle ticket = client.become_producer(document, "text");
  const Reply reply = client.reserve(ticket, 0, 300);
  CHECK(client.ticket_abort(ticket).code() == POLYKV_OK);
  CHECK(client.progress(ticket).code() == POLYKV_ERR_STALE);
  CHECK(client.commit(*reply.as<wire::SegmentReserved>().segment()).code() == POLYKV_ERR_STALE);
  const Reply status = client.status();
  CHECK(status.as<wire::StatusReply>().segment_count() == 0);
  CHECK(client.acquire({}, &document).code() == POLYKV_ERR_NOT_FOUND);
}

// ---- acquiring ----

TEST_CASE("an acquire says which document in exactly one way") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document;
  AcquireFields two_ways;
  two_ways.name = "text";
  CHECK(client.acquire(two_ways, &document).code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(client.acquire({}).code() == POLYKV_ERR_INVALID_ARGUMENT);
  AcquireFields producing_a_name;
  producing_a_name.name = "text";
  producing_a_name.may_produce = true;
  CHECK(client.acquire(producing_a_name).code() == POLYKV_ERR_INVALID_ARGUMENT);
  AcquireFields bad_name;
  bad_name.name = "line\nbreak";
  CHECK(client.acquire(bad_name).code() == POLYKV_ERR_INVALID_ARGUMENT);
  AcquireFields bad_timeout;
  bad_timeout.name = "text";
  bad_timeout.timeout_ms = -2;
  CHECK(client.acquire(bad_timeout).code() == POLYKV_ERR_INVALID_ARGUMENT);
  TestDocument empty;
  empty.tokens.clear();
  CHECK(client.acquire({}, &empty).code() == POLYKV_ERR_EMPTY_DOCUMENT);
  CHECK(client.status().code() == POLYKV_OK);
}

TEST_CASE("token lists must be sealed, as long as announced, and not too long") {
  DaemonProcess daemon({"--document-tokens", "400"});
  RawClient client(daemon.socket_path());
  const auto acquire_with = [&](int fd, uint64_t token_count) {
    flatbuffers::FlatBufferBuilder builder;
    const auto model = to_wire(builder, TestDocument().model);
    wire::AcquireBuilder acquire(builder);
    acquire.add_model(model);
    acquire.add_token_count(token_count);
    return client.receive(client.send(builder, acquire.Finish(), {fd})).code();
  };
  const std::vector<uint32_t> ids = test_ids(300);
  const UniqueFd sealed = take(memfd_from_tokens(ids));
  const UniqueFd unsealed = take(memfd_create_sealable("test"));
  REQUIRE(write(unsealed.get(), ids.data(), ids.size() * 4) == 1200);
  CHECK(acquire_with(sealed.get(), 300) == POLYKV_ERR_NOT_FOUND);
  CHECK(acquire_with(sealed.get(), 299) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(acquire_with(unsealed.get(), 300) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(acquire_with(sealed.get(), 401) == POLYKV_ERR_LIMIT);
  CHECK(acquire_with(sealed.get(), UINT64_MAX) == POLYKV_ERR_LIMIT);
}

TEST_CASE("token lists of all requests together are bounded, and waiters share one") {
  DaemonProcess daemon({"--document-tokens", "300", "--budget", "4096"});
  RawClient client(daemon.socket_path());
  const wire::Handle first = client.become_producer(document_number(1));
  const TestDocument shared = document_number(2);
  const wire::Handle second = client.become_producer(shared);
  AcquireFields fields;
  fields.may_produce = true;
  const TestDocument third = document_number(3);
  CHECK(client.acquire(fields, &third).code() == POLYKV_ERR_LIMIT);
  client.ticket_abort(first);
  AcquireFields waiting;
  waiting.wait = true;
  RawClient other(daemon.socket_path());
  for (int i = 0; i < 5; ++i) {
    client.send_acquire(waiting, &shared);
    CHECK(client.status().code() == POLYKV_OK);  // by then it waits
    CHECK(other.acquire({}, &shared).code() == POLYKV_ERR_BUSY);
  }
  (void)second;
}

TEST_CASE("names: taken, replaced, promised, removed") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  client.publish(document_number(1), "text");
  AcquireFields fields;
  fields.may_produce = true;
  fields.publish_name = "text";
  const TestDocument second = document_number(2);
  CHECK(client.acquire(fields, &second).code() == POLYKV_ERR_ALREADY_EXISTS);
  fields.replace_name = true;
  const Reply granted = client.acquire(fields, &second);
  const wire::Handle ticket = *granted.as<wire::TicketGranted>().ticket();
  fields.replace_name = false;
  fields.publish_name = "other";
  const TestDocument third = document_number(3);
  const wire::Handle other_ticket =
      *client.acquire(fields, &third).as<wire::TicketGranted>().ticket();
  const TestDocument fourth = document_number(4);
  CHECK(client.acquire(fields, &fourth).code() == POLYKV_ERR_ALREADY_EXISTS);
  CHECK(client.ticket_abort(other_ticket).code() == POLYKV_OK);

  const Reply reserved = client.reserve(ticket, 0, 300);
  RawClient::fill(reserved, second, 0, 300);
  CHECK(client.commit(*reserved.as<wire::SegmentReserved>().segment()).code() == POLYKV_OK);
  // The first lost its only name, and went.
  const Reply page = client.list();
  REQUIRE(page.as<wire::Listing>().documents()->size() == 1);
  const Digest digest = from_wire(*page.as<wire::Listing>().documents()->Get(0)->digest());
  CHECK(digest == chain_digests(chain_root(second.model), second.tokens).back());
  CHECK(client.remove("no such name").code() == POLYKV_ERR_NOT_FOUND);
  CHECK(client.remove("text").code() == POLYKV_OK);
  CHECK(client.remove("text").code() == POLYKV_ERR_NOT_FOUND);
  CHECK(client.remove("").code() == POLYKV_ERR_INVALID_ARGUMENT);
}

TEST_CASE("removing by digest takes all profiles") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  TestDocument document;
  const Digest digest = client.publish(document, "k8v8");
  document.profile = Profile::exact;
  CHECK(client.publish(document, "exact") == digest);
  CHECK(client.remove("", &digest).code() == POLYKV_OK);
  CHECK(client.list().as<wire::Listing>().documents()->size() == 0);
  CHECK(client.remove("", &digest).code() == POLYKV_ERR_NOT_FOUND);
}

TEST_CASE("a request id that is in use ends the connection") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document;
  client.become_producer(document, "text");
  AcquireFields waiting;
  waiting.name = "text";
  waiting.wait = true;
  const uint64_t id = client.send_acquire(waiting);
  flatbuffers::FlatBufferBuilder builder;
  client.send_bytes(make_packet(builder, id, wire::CreateList(builder, 0)));
  CHECK(client.is_closed_by_daemon());
  CHECK(client.last_error() == POLYKV_ERR_PROTOCOL);
}
