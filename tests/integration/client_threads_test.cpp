// One session and one lease used by many threads; meant for the thread sanitizer as well.
#include <atomic>
#include <catch2/catch.hpp>
#include <thread>

#include "tests/support/daemon_process.h"
#include "tests/support/require_ok.h"
#include "tests/support/synthetic_document.h"

using namespace polykv;
using namespace polykv::test;

namespace {

/// Runs body(index) on `count` threads; returns how many answered false.
template <typename Body>
int count_failures(int count, Body body) {
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] { failures += body(i) ? 0 : 1; });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

}  // namespace

TEST_CASE("threads decode one lease at once, each its own layer and range") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(1000);
  const client::Lease lease = document.publish(session, "a", 256);
  const int failures = count_failures(8, [&](int i) {
    const auto layer = static_cast<uint32_t>(i % 2);
    const auto first = static_cast<uint64_t>(100 * i);
    const std::vector<float> want = document.values(true, layer, first, 200);
    std::vector<float> v(want.size());
    client::DecodeOptions options;
    options.first_token = first;
    options.token_count = 200;
    options.v = v.data();
    for (int round = 0; round < 20; ++round) {
      std::fill(v.begin(), v.end(), 9.0F);
      if (!lease.decode(layer, options) || v != want) return false;
    }
    return lease.verify().ok();
  });
  CHECK(failures == 0);
}

TEST_CASE("threads attend to one lease at once, each with threads of its own or alone") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(1000);
  document.profile = POLYKV_PROFILE_K5V4;
  const client::Lease lease = document.publish(session, "a", 256);
  const auto attend = [&](uint32_t layer, uint32_t threads, std::vector<float>& output) {
    const std::vector<float> q(size_t{4} * document.layers[layer].k_head_dim, 0.5F);
    output.assign(size_t{4} * document.layers[layer].v_head_dim, 9.0F);
    client::AttendOptions options;
    options.token_count = 1000;
    options.query_count = 2;
    options.head_count = 2;
    options.q = q.data();
    options.output = output.data();
    options.thread_count = threads;
    return lease.attend(layer, options).ok();
  };
  const int failures = count_failures(6, [&](int i) {
    const auto layer = static_cast<uint32_t>(i % 2);
    const auto threads = static_cast<uint32_t>(1 + i / 2);
    std::vector<float> want;
    std::vector<float> output;
    if (!attend(layer, threads, want)) return false;
    for (int round = 0; round < 50; ++round) {
      if (!attend(layer, threads, output) || output != want) return false;
    }
    return true;
  });
  CHECK(failures == 0);
}

TEST_CASE("threads encode the layers of one segment at once") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(300);
  document.layers.assign(8, {2, 64, 64, 0});
  client::Publisher publisher = document.become_producer(session, "a");
  auto segment = publisher.begin_segment();
  REQUIRE_OK(segment);
  const int failures = count_failures(8, [&](int i) {
    const auto layer = static_cast<uint32_t>(i);
    const std::vector<float> k = document.values(false, layer, 0, 300);
    const std::vector<float> v = document.values(true, layer, 0, 300);
    client::KvSource source;
    source.k = k.data();
    source.v = v.data();
    return segment->encode_layer(layer, source).ok();
  });
  CHECK(failures == 0);
  REQUIRE_OK(segment->commit());
  const auto lease = publisher.finish_with_lease();
  REQUIRE_OK(lease);
  CHECK(document.worst_error(*lease) == 0);
}

TEST_CASE("threads acquire, list, ask and release on one session at once") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(1000);
  const SyntheticDocument second(300, 2);
  document.publish(session, "many segments", 64);
  second.publish(session, "one segment");
  const int failures = count_failures(8, [&](int i) {
    for (int round = 0; round < 20; ++round) {
      const bool many = (i + round) % 2 == 0;
      auto lease = session.acquire(many ? "many segments" : "one segment");
      if (!lease || lease->info().segment_count != (many ? 16U : 1U)) return false;
      if (*lease->tokens() != (many ? document : second).tokens) return false;
      if (session.acquire("nothing").error().status != POLYKV_ERR_NOT_FOUND) return false;
      // Each thread has its own last error.
      if (std::string(polykv_last_error()).find("nothing") == std::string::npos) return false;
      int count = 0;
      const auto visit = [&](const polykv_document_info&) { return ++count, true; };
      if (!session.list(visit) || count != 2 || !session.daemon_status()) return false;
      if (!lease->release()) return false;
    }
    return true;
  });
  CHECK(failures == 0);
  CHECK(session.daemon_status()->lease_count == 0);
}

TEST_CASE("one thread waits for a document while others of its session go on") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  client::Session producing = connect_to(daemon.socket_path());
  const SyntheticDocument document(500);
  const client::Model model = document.model();
  client::Publisher publisher = document.become_producer(producing);
  std::atomic<bool> asked{false};
  const int failures = count_failures(4, [&](int i) {
    if (i == 0) {
      client::AcquireOptions options = document.options(model);
      options.flags = POLYKV_ACQUIRE_WAIT;
      asked = true;
      asked.notify_all();
      const auto lease = session.acquire(options);
      return lease.ok() && document.worst_error(*lease) == 0;
    }
    asked.wait(false);
    for (int round = 0; round < 50; ++round) {
      if (!session.daemon_status()) return false;
    }
    if (i != 1) return true;
    auto segment = publisher.begin_segment();
    return segment.ok() && document.encode_all(*segment, 0, 500).ok() && segment->commit().ok();
  });
  CHECK(failures == 0);
}
