// Reading a document while somebody produces it.
#include <catch2/catch.hpp>
#include <optional>
#include <thread>

#include "libclient/acquire.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr uint64_t kSegment = 256;

std::shared_ptr<lib::Session> connect(const DaemonProcess& daemon) {
  lib::ConnectOptions options;
  options.socket_path = daemon.socket_path();
  return take(lib::Session::connect(options));
}

lib::AcquireRequest request_for(const TestDocument& document) {
  lib::AcquireRequest request;
  request.model = &document.model;
  request.tokens = document.tokens;
  request.profile = document.profile;
  return request;
}

std::shared_ptr<lib::Publisher> produce(const std::shared_ptr<lib::Session>& session,
                                        const TestDocument& document,
                                        const std::string& name = "") {
  lib::AcquireRequest request = request_for(document);
  request.may_produce = true;
  request.publish_name = name;
  return take(lib::acquire(session, request)).publisher;
}

std::unique_ptr<lib::Lease> stream(const std::shared_ptr<lib::Session>& session,
                                   const TestDocument& document) {
  lib::AcquireRequest request = request_for(document);
  request.stream = true;
  return take(lib::acquire(session, request)).lease;
}

/// K of the first head is the token's position; everything else is 1.
LayerValues positions(const LayerGeometry& geometry, uint64_t first, uint64_t count) {
  LayerValues values = empty_values(geometry, count);
  std::fill(values.k.begin(), values.k.end(), 1.0F);
  std::fill(values.v.begin(), values.v.end(), 1.0F);
  for (uint64_t i = 0; i < count * geometry.k_head_dim; ++i)
    values.k[i] = static_cast<float>(first + i / geometry.k_head_dim);
  return values;
}

Status publish_next(lib::Publisher& publisher, uint64_t count = kSegment) {
  count = std::min(count, publisher.token_count() - publisher.next_token());
  POLYKV_ASSIGN_OR_RETURN(const auto segment, publisher.begin_segment(count));
  const auto& layers = publisher.identity().layers;
  for (uint32_t i = 0; i < layers.size(); ++i) {
    const LayerValues values = positions(layers[i], segment->first_token(), count);
    POLYKV_RETURN_IF_ERROR(segment->encode_layer(i, values.source()));
  }
  return segment->commit();
}

/// Whether these tokens decode to what their producer put in. Also for threads, which Catch2 is not.
bool reads(const lib::Lease& lease, uint64_t first, uint64_t count) {
  const LayerGeometry& geometry = lease.document().identity.layers[0];
  std::vector<float> k(count * geometry.kv_head_count * geometry.k_head_dim);
  lib::DecodeRequest request;
  request.first_token = first;
  request.token_count = count;
  request.k = k.data();
  if (!lease.decode(0, request).is_ok()) return false;
  for (uint64_t i = 0; i < count; ++i) {
    const float expected = static_cast<float>(first + i);
    if (std::abs(k[i * geometry.kv_head_count * geometry.k_head_dim] - expected) >
        0.01F * expected) {
      return false;
    }
  }
  return true;
}

uint64_t committed_tokens(const DaemonProcess& daemon) {
  polykv_daemon_status status{};
  const auto session = connect(daemon);
  REQUIRE_OK(lib::read_daemon_status(*session, status));
  return status.tokens_committed_total;
}

lib::Deadline soon() {
  return lib::deadline_after_ms(60'000);
}

}  // namespace

TEST_CASE("a segment is read before the next one is committed") {
  DaemonProcess daemon;
  const TestDocument document = document_number(1, 5 * kSegment + 100);
  const auto publisher = produce(connect(daemon), document);
  const auto lease = stream(connect(daemon), document);
  CHECK(lease->document().state == "filling");
  CHECK(lease->document().token_count == document.tokens.size());
  CHECK(lease->available_tokens() == 0);
  CHECK(lease->wait_for(1, lib::deadline_after_ms(20)).code() == POLYKV_ERR_TIMEOUT);
  while (publisher->next_token() < document.tokens.size()) {
    const uint64_t first = publisher->next_token();
    REQUIRE_OK(publish_next(*publisher));
    REQUIRE_OK(lease->wait_for(first + 1, soon()));
    CHECK(lease->available_tokens() == publisher->next_token());
    CHECK(reads(*lease, first, publisher->next_token() - first));
    if (publisher->next_token() < document.tokens.size()) {
      uint32_t id = 0;
      CHECK(lease->copy_tokens(publisher->next_token(), 1, &id).code() == POLYKV_ERR_BUSY);
    }
  }
  REQUIRE_OK(publisher->finish());
  CHECK_OK(lease->wait_for(document.tokens.size(), soon()));
  CHECK(lease->wait_for(document.tokens.size() + 1, soon()).code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(reads(*lease, 0, document.tokens.size()));
  CHECK_OK(lease->verify());
  CHECK_OK(lease->release());
}

TEST_CASE("a reader who comes later gets at once what is sealed") {
  DaemonProcess daemon;
  const TestDocument document = document_number(1, 40 * kSegment);
  const auto publisher = produce(connect(daemon), document, "text");
  for (int i = 0; i < 20; ++i) REQUIRE_OK(publish_next(*publisher));
  lib::AcquireRequest by_name;
  by_name.name = "text";
  by_name.stream = true;
  const auto session = connect(daemon);
  const auto lease = take(lib::acquire(session, by_name)).lease;
  CHECK(lease->available_tokens() == 20 * kSegment);
  CHECK(reads(*lease, 0, 20 * kSegment));
  for (int i = 0; i < 20; ++i) REQUIRE_OK(publish_next(*publisher));
  CHECK_OK(lease->wait_for(40 * kSegment, soon()));
  CHECK(reads(*lease, 0, 40 * kSegment));
}

TEST_CASE("a lost producer costs only the rest, and whoever reads goes on") {
  DaemonProcess daemon;
  const TestDocument document = document_number(1, 6 * kSegment);
  auto session = connect(daemon);
  auto publisher = produce(session, document);
  const auto lease = stream(connect(daemon), document);
  for (int i = 0; i < 3; ++i) REQUIRE_OK(publish_next(*publisher));
  SECTION("nobody takes over at first") {
    session->close();
    const Status lost = lease->wait_for(document.tokens.size(), soon());
    CHECK(lost.code() == POLYKV_ERR_PRODUCER_LOST);
    CHECK(lost.message().find("768 of 1536") != std::string::npos);
    CHECK(reads(*lease, 0, 3 * kSegment));
    publisher = produce(connect(daemon), document);
  }
  SECTION("somebody waited for that") {
    std::optional<lib::Acquired> acquired;
    std::thread heir([&] {
      lib::AcquireRequest request = request_for(document);
      request.may_produce = true;
      request.wait = true;
      auto got = lib::acquire(connect(daemon), request);
      if (got.is_ok()) acquired = std::move(got).value();
    });
    // It is one of the daemon's waiting requests before the connection ends.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    session->close();
    heir.join();
    REQUIRE(acquired);
    publisher = std::move(acquired->publisher);
  }
  REQUIRE(publisher != nullptr);
  CHECK(publisher->next_token() == 3 * kSegment);
  std::thread waiter([&] {
    const Status status = lease->wait_for(document.tokens.size(), soon());
    if (!status.is_ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  });
  while (publisher->next_token() < document.tokens.size()) REQUIRE_OK(publish_next(*publisher));
  waiter.join();
  CHECK(reads(*lease, 0, document.tokens.size()));
  CHECK(committed_tokens(daemon) == document.tokens.size());
}

TEST_CASE("many threads read what is there while one waits for the rest") {
  DaemonProcess daemon;
  const TestDocument document = document_number(1, 8 * kSegment);
  const auto publisher = produce(connect(daemon), document);
  const auto lease = stream(connect(daemon), document);
  REQUIRE_OK(publish_next(*publisher));
  REQUIRE_OK(lease->wait_for(1, soon()));
  std::atomic<bool> good{true};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (lease->available_tokens() < document.tokens.size())
        good = good && reads(*lease, 0, lease->available_tokens());
    });
  }
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back(
        [&] { good = good && lease->wait_for(document.tokens.size(), soon()).is_ok(); });
  }
  while (publisher->next_token() < document.tokens.size()) REQUIRE_OK(publish_next(*publisher));
  for (std::thread& thread : threads) thread.join();
  CHECK(good);
}

TEST_CASE("a profile of one segment cannot be streamed, and says so by name") {
  DaemonProcess daemon;
  TestDocument document = document_number(1, 300);
  document.profile = Profile::paper_k8v3;
  const auto publisher = produce(connect(daemon), document);
  lib::AcquireRequest request = request_for(document);
  request.stream = true;
  const auto refused = lib::acquire(connect(daemon), request);
  CHECK(refused.status().code() == POLYKV_ERR_UNSUPPORTED);
  CHECK(refused.status().message().find("paper-k8v3") != std::string::npos);
}

TEST_CASE("a streamed document that is dropped tells its readers, who keep what they have") {
  DaemonProcess daemon;
  const TestDocument document = document_number(1, 4 * kSegment);
  auto session = connect(daemon);
  const auto publisher = produce(session, document, "text");
  const auto lease = stream(connect(daemon), document);
  SECTION("before its first segment") {
    session->close();
    CHECK(lease->wait_for(1, soon()).code() == POLYKV_ERR_PRODUCER_LOST);
  }
  SECTION("removed after it was lost") {
    REQUIRE_OK(publish_next(*publisher));
    session->close();
    CHECK(lease->wait_for(4 * kSegment, soon()).code() == POLYKV_ERR_PRODUCER_LOST);
    const auto other = connect(daemon);
    CHECK_OK(lib::remove_document(*other, "text", nullptr));
    const Status dropped = lease->wait_for(4 * kSegment, soon());
    CHECK(dropped.code() == POLYKV_ERR_PRODUCER_LOST);
    CHECK(dropped.message().find("acquire it anew") != std::string::npos);
    CHECK(lease->wait_for(4 * kSegment, soon()).code() == POLYKV_ERR_PRODUCER_LOST);
    CHECK(reads(*lease, 0, kSegment));
    CHECK_OK(lease->release());
    polykv_daemon_status status{};
    REQUIRE_OK(lib::read_daemon_status(*other, status));
    CHECK(status.segment_count == 0);
    CHECK(status.retiring_bytes == 0);
  }
}

TEST_CASE("a million tokens in hundreds of segments stream within the limits on descriptors",
          "[memfd]") {
  DaemonProcess daemon;
  TestDocument document;
  document.model = test_model({{1, 16, 16, 0}});
  document.tokens = test_ids(1'000'000);
  const auto publisher = produce(connect(daemon), document);
  const auto lease = stream(connect(daemon), document);
  const size_t before = daemon.open_descriptor_count();
  Status published;
  std::thread producer([&] {
    while (published.is_ok() && publisher->next_token() < document.tokens.size())
      published = publish_next(*publisher, lib::kSegmentTokens);
  });
  uint64_t first = 0;
  bool good = true;
  while (good && first < document.tokens.size()) {
    good = lease->wait_for(first + 1, soon()).is_ok() && reads(*lease, first, 1);
    first = lease->available_tokens();
  }
  producer.join();
  CHECK(published.message() == "");
  CHECK(good);
  CHECK(lease->segments()->size() == 245);
  CHECK(daemon.open_descriptor_count() <= before + 245 + 2);
  CHECK(reads(*lease, 999'000, 1000));
}
