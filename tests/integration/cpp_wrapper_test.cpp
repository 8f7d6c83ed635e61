// polykv/polykv.hpp on the shared library against polykvd.
#include <algorithm>
#include <catch2/catch.hpp>
#include <stdexcept>
#include <thread>

#include "tests/support/daemon_process.h"
#include "tests/support/require_ok.h"
#include "tests/support/synthetic_document.h"

using namespace polykv::client;
using polykv::test::connect_to;
using polykv::test::DaemonProcess;
using polykv::test::SyntheticDocument;

TEST_CASE("a document published with the wrapper is read with the wrapper") {
  const DaemonProcess daemon;
  Session producer = connect_to(daemon.socket_path());
  Session reader = connect_to(daemon.socket_path());
  const SyntheticDocument document(5000);
  document.publish(producer, "manual");
  const auto lease = reader.acquire("manual");
  REQUIRE_OK(lease);
  const DocumentInfo info = lease->info();
  CHECK(info.token_count == 5000);
  CHECK(info.segment_count == 2);  // 4,096 tokens and the rest, unless somebody asks otherwise
  CHECK(*lease->tokens() == document.tokens);
  CHECK(document.worst_error(*lease) == 0);
  CHECK_OK(lease->verify());
  CHECK(lease->layer_view(1, 1)->first_token == 4096);
}

TEST_CASE("what an owner holds is given back when it goes out of scope") {
  const DaemonProcess daemon;
  Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(100);
  {
    Publisher publisher = document.become_producer(session, "a");
    auto segment = publisher.begin_segment();
    REQUIRE_OK(segment);
    CHECK(session.daemon_status()->stored_bytes > 0);
  }
  CHECK(session.daemon_status()->stored_bytes == 0);
  {
    const Lease lease = document.publish(session, "a");
    Lease moved = session.acquire("a").value_or_throw();
    Lease target = std::move(moved);
    CHECK(session.daemon_status()->lease_count == 2);
  }
  CHECK(session.daemon_status()->lease_count == 0);
  Lease released = session.acquire("a").value_or_throw();
  CHECK_OK(released.release());
  CHECK(session.daemon_status()->lease_count == 0);
}

TEST_CASE("a failed call has the code and message, and throws when asked to") {
  const DaemonProcess daemon;
  Session session = connect_to(daemon.socket_path());
  auto lease = session.acquire("nothing");
  REQUIRE(!lease.ok());
  CHECK(lease.error().status == POLYKV_ERR_NOT_FOUND);
  CHECK(lease.error().message.find("nothing") != std::string::npos);
  try {
    std::move(lease).value_or_throw();
    FAIL("it does not throw");
  } catch (const Exception& error) {
    CHECK(error.status() == POLYKV_ERR_NOT_FOUND);
    CHECK(std::string(error.what()).find("nothing") != std::string::npos);
  }
}

TEST_CASE("listing and removing, and an exception of the callback passes through") {
  const DaemonProcess daemon;
  Session session = connect_to(daemon.socket_path());
  const Lease first = SyntheticDocument(100, 1).publish(session, "first");
  const Lease second = SyntheticDocument(100, 2).publish(session, "second");
  int count = 0;
  REQUIRE_OK(session.list([&](const polykv_document_info&) { return ++count, true; }));
  CHECK(count == 2);
  count = 0;
  REQUIRE_OK(session.list([&](const polykv_document_info&) { return ++count, false; }));
  CHECK(count == 1);
  CHECK_THROWS_AS(static_cast<void>(session.list([](const polykv_document_info&) -> bool {
                    throw std::out_of_range("mine");
                  })),
                  std::out_of_range);
  CHECK_OK(session.remove("first"));
  const DocumentInfo info = second.info();
  CHECK_OK(session.remove(std::span<const uint8_t, 32>(info.digest)));
  CHECK(session.remove("second").error().status == POLYKV_ERR_NOT_FOUND);
}

TEST_CASE("a listing longer than a page is whole") {
  const DaemonProcess daemon({"--list-page-documents", "2"});
  Session session = connect_to(daemon.socket_path());
  for (uint32_t i = 0; i < 5; ++i) {
    SyntheticDocument(10, i).publish(session, std::to_string(i).c_str());
  }
  std::string names;
  REQUIRE_OK(session.list([&](const polykv_document_info& info) {
    names += info.names[0];
    return true;
  }));
  std::sort(names.begin(), names.end());
  CHECK(names == "01234");
}

TEST_CASE("the second of two that want to produce waits and gets the document") {
  const DaemonProcess daemon;
  Session first = connect_to(daemon.socket_path());
  Session second = connect_to(daemon.socket_path());
  const SyntheticDocument document(100);
  const Model model = document.model();
  Publisher publisher = document.become_producer(first);
  std::thread waiter([&] {
    AcquireOptions options = document.options(model);
    options.flags = POLYKV_ACQUIRE_WAIT;
    auto acquired = second.acquire_or_produce(options);
    if (acquired.ok() && std::holds_alternative<Lease>(*acquired)) {
      if (document.worst_error(std::get<Lease>(*acquired)) == 0) return;
    }
    throw std::runtime_error("the waiter did not get the document");
  });
  document.publish_segment(publisher);
  CHECK_OK(publisher.finish());
  waiter.join();
}
