// Publishing and reading a document, at the level of packets.
#include <catch2/catch.hpp>

#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"

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
    uint64_t next_token = 0;
    for (size_t i = 0; i < 2; ++i) {
      const Mapping mapping =
          take(Mapping::map(leased.fds[i].get(), leased.sizes_bytes[i], MapAccess::read_only));
      const SegmentView view = take(SegmentView::open(mapping.bytes()));
      CHECK(view.verify_checksums().is_ok());
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
