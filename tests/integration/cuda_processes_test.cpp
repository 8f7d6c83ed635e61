// Documents in device memory and processes that die, fork, or are another user's; on an emulated GPU.
// The test's own process never uses it: a forked child of one that has could not.
// Numbers are rows of the failure checklist.
#include <catch2/catch.hpp>
#include <thread>

#include "tests/support/child_process.h"
#include "tests/support/cuda_bench.h"
#include "tests/support/raw_client.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr uint64_t kSegmentBytes = device::kGranularityBytes;

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what + ": " + polykv_last_error());
}

polykv_status code_of(const auto& result) {
  return result.ok() ? POLYKV_OK : result.error().status;
}

client::Session connect_in_child(const std::string& socket_path) {
  client::ConnectOptions options;
  options.socket_path = socket_path.c_str();
  auto session = client::Session::connect(options);
  expect(session.ok(), "connect");
  return std::move(*session);
}

client::Publisher produce_in_child(client::Session& session, const SyntheticDocument& document,
                                   const char* name) {
  const client::Model model = document.model();
  auto acquired = session.acquire_or_produce(document.options(model, name));
  expect(acquired.ok() && std::holds_alternative<client::Publisher>(*acquired), "produce");
  return std::get<client::Publisher>(std::move(*acquired));
}

polykv_segment* begin_in_child(client::Publisher& publisher) {
  polykv_segment* segment = nullptr;
  expect(polykv_cuda_segment_begin(publisher.get(), 0, &segment) == POLYKV_OK, "begin on the GPU");
  return segment;
}

/// Publishes from host memory: no GPU is used here.
void publish(const DaemonProcess& daemon, const TestDocument& document, const char* name,
             uint64_t segment_tokens = 4096) {
  RawClient client(daemon.socket_path());
  client.publish(document, name, segment_tokens);
}

struct Counts {
  uint64_t stored_bytes = 0;
  uint64_t retiring_bytes = 0;
  uint64_t lease_count = 0;
};
Counts status_of(RawClient& client) {
  Counts status;
  const Reply reply = client.status();
  status.stored_bytes = reply.as<wire::StatusReply>().stored_bytes();
  status.retiring_bytes = reply.as<wire::StatusReply>().retiring_bytes();
  status.lease_count = reply.as<wire::StatusReply>().lease_count();
  return status;
}

/// Until the daemon's device thread has done what was asked of it.
void wait_for_live_count(const CudaBench& bench, uint64_t count) {
  while (bench.device().state()->live_count() != count) std::this_thread::yield();
}

uint32_t importers(const CudaBench& bench) {
  uint32_t count = 0;
  const auto state = bench.device().state();
  for (const EmulatedAllocation& allocation : state->allocations)
    count += allocation.importer_count();
  return count;
}

}  // namespace

TEST_CASE("eight processes read one document in device memory at once") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  publish(daemon, TestDocument(), "a", 100);
  std::vector<std::unique_ptr<ChildProcess>> agents;
  for (int i = 0; i < 8; ++i) {
    agents.push_back(std::make_unique<ChildProcess>([&](const Channel& parent) {
      client::Session session = connect_in_child(daemon.socket_path());
      const auto lease = session.acquire("a");
      expect(lease.ok() && lease->verify().ok(), "verify");
      parent.say("read");
      parent.hear();
      expect(lease->verify().ok(), "verify again");
    }));
  }
  for (const auto& agent : agents) CHECK(agent->hear() == "read");
  CHECK(importers(bench) == 3 * 8);
  CHECK(bench.device().state()->live_count() == 3);  // and no more copies
  for (const auto& agent : agents) agent->say("go on");
  for (const auto& agent : agents) CHECK(agent->succeeds());
}

TEST_CASE("row 1: what a killed agent had open is freed, and only then") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  publish(daemon, TestDocument(), "a");
  ChildProcess agent([&](const Channel& parent) {
    client::Session session = connect_in_child(daemon.socket_path());
    const auto lease = session.acquire("a");
    expect(lease.ok() && lease->verify().ok(), "verify");
    parent.say("reading");
    parent.hear();
  });
  REQUIRE(agent.hear() == "reading");
  RawClient client(daemon.socket_path());
  CHECK(client.remove("a").code() == POLYKV_OK);
  CHECK(status_of(client).retiring_bytes == kSegmentBytes);
  CHECK(bench.device().state()->live_count() == 1);
  CHECK(agent.kill().was_killed);
  wait_for_live_count(bench, 0);  // ~CudaBench: it was not freed while the agent had it open
  CHECK(status_of(client).retiring_bytes == 0);
}

TEST_CASE("rows 2 and 3: a producer on the GPU that is killed leaves nothing") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  const SyntheticDocument document(300);
  ChildProcess producer([&](const Channel& parent) {
    client::Session session = connect_in_child(daemon.socket_path());
    client::Publisher publisher = produce_in_child(session, document, "a");
    client::Segment segment(begin_in_child(publisher));
    expect(document.encode_all(segment, 0, 300).ok(), "encode");
    parent.say("half way");
    parent.hear();
  });
  REQUIRE(producer.hear() == "half way");
  RawClient client(daemon.socket_path());
  CHECK(status_of(client).stored_bytes == kSegmentBytes);
  CHECK(importers(bench) == 1);
  CHECK(producer.kill().was_killed);
  wait_for_live_count(bench, 0);
  const auto status = status_of(client);
  CHECK(status.stored_bytes == 0);
  CHECK(status.retiring_bytes == 0);
}

TEST_CASE("row 4: what a process may still write to stays until the process is gone") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  const SyntheticDocument document(300);
  ChildProcess producer([&](const Channel& parent) {
    client::Session session = connect_in_child(daemon.socket_path());
    client::Publisher publisher = produce_in_child(session, document, "a");
    polykv_segment* const segment = begin_in_child(publisher);
    static_cast<void>(segment);  // with work in flight: neither committed nor given up
    { const client::Session closed = std::move(session); }
    parent.say("closed");
    parent.hear();
    std::_Exit(0);
  });
  REQUIRE(producer.hear() == "closed");
  RawClient client(daemon.socket_path());
  // Its socket is closed, and the daemon has seen that: the next request comes after it.
  CHECK(status_of(client).retiring_bytes == kSegmentBytes);
  CHECK(bench.device().state()->live_count() == 1);
  producer.say("exit");
  CHECK(producer.succeeds());
  wait_for_live_count(bench, 0);
  CHECK(status_of(client).retiring_bytes == 0);
}

TEST_CASE("row 6: a child that lives on does not keep the parent from committing into a GPU") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  const SyntheticDocument document(300);
  ChildProcess agent([&](const Channel&) {
    client::Session session = connect_in_child(daemon.socket_path());
    client::Publisher publisher = produce_in_child(session, document, "a");
    polykv_segment* const raw = begin_in_child(publisher);
    client::Segment segment(raw);
    expect(document.encode_all(segment, 0, 300).ok(), "encode");
    ChildProcess child([&](const Channel& channel) {
      const OwnMemory own;
      uint64_t bytes = 0;
      expect(polykv_cuda_encode_workspace_bytes(raw, 0, &bytes) == POLYKV_ERR_FORKED, "workspace");
      polykv_cuda_queue queue{};
      polykv_kv_source source{};
      expect(polykv_cuda_segment_encode_layer(raw, 0, &source, &queue, nullptr, 0) ==
                 POLYKV_ERR_FORKED,
             "encode in the child");
      channel.say("forked");
      channel.hear();
      { const client::Segment freed = std::move(segment); }
      own.write();
    });
    expect(child.hear() == "forked", "the child's handles");
    expect(segment.commit().ok(), "commit");
    child.say("committed");
    expect(child.succeeds(), "the child");
  });
  CHECK(agent.succeeds());
}

TEST_CASE("row 6: after fork a lease answers FORKED and no device call is made") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  publish(daemon, TestDocument(), "a");
  ChildProcess agent([&](const Channel&) {
    client::Session session = connect_in_child(daemon.socket_path());
    client::Lease lease = std::move(*session.acquire("a"));
    expect(lease.verify().ok(), "verify");
    ChildProcess child([&](const Channel&) {
      polykv_cuda_layer_view view;
      polykv_cuda_layer_view_init(&view);
      expect(polykv_cuda_lease_layer_view(lease.get(), 0, 0, -1, &view) == POLYKV_ERR_FORKED,
             "view");
      expect(code_of(lease.verify()) == POLYKV_ERR_FORKED, "verify");
      expect(code_of(lease.release()) == POLYKV_ERR_FORKED, "release");
    });
    expect(child.succeeds(), "the child");
    expect(lease.verify().ok(), "the parent goes on");
    expect(lease.release().ok(), "release");
  });
  CHECK(agent.succeeds());  // ~CudaBench: nothing was called after a fork
}

TEST_CASE("rows 13 and 15: with the daemon killed, agents stop, and their memory stays pinned") {
  const CudaBench bench;
  DaemonProcess daemon(bench.device().flags());
  publish(daemon, TestDocument(), "a", 150);
  ChildProcess agent([&](const Channel& parent) {
    client::Session session = connect_in_child(daemon.socket_path());
    client::Lease lease = std::move(*session.acquire("a"));
    expect(lease.verify().ok(), "verify");
    parent.say("reading");
    parent.hear();
    // What device memory of a dead exporter holds is undefined: it must not be read.
    expect(code_of(lease.verify()) == POLYKV_ERR_DAEMON_GONE, "verify");
    expect(code_of(lease.layer_view(0, 0)) == POLYKV_ERR_DAEMON_GONE, "view");
    polykv_cuda_layer_view view;
    polykv_cuda_layer_view_init(&view);
    expect(polykv_cuda_lease_layer_view(lease.get(), 0, 0, -1, &view) == POLYKV_ERR_DAEMON_GONE,
           "view on the GPU");
    expect(lease.tokens().ok(), "tokens");
    parent.say("told");
    parent.hear();
    expect(code_of(lease.release()) == POLYKV_ERR_DAEMON_GONE, "release");
    // The next daemon serves the same process.
    client::Session next = connect_in_child(daemon.socket_path());
    const auto again = next.acquire("b");
    expect(again.ok() && again->verify().ok(), "verify at the next daemon");
  });
  REQUIRE(agent.hear() == "reading");
  CHECK(daemon.kill().was_killed);
  agent.say("killed");
  REQUIRE(agent.hear() == "told");

  daemon.restart(bench.device().flags({"--budget", "1GiB"}));
  RawClient client(daemon.socket_path());
  CHECK(bench.device().state()->live_count() == 2);  // pinned by the agent, nobody's budget
  const Reply reply = client.status();
  CHECK(reply.as<wire::StatusReply>().device_free_bytes() <=
        reply.as<wire::StatusReply>().device_total_bytes() - 2 * kSegmentBytes);
  client.publish(document_number(2), "b");
  agent.say("release");
  CHECK(agent.succeeds());
  wait_for_live_count(bench, 1);
}

TEST_CASE("row 11: a GPU that fails in one agent fails it alone; daemon and other agents go on") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  publish(daemon, TestDocument(), "a");
  const auto start = [&](bool is_faulty) {
    return std::make_unique<ChildProcess>([&daemon, is_faulty](const Channel& parent) {
      client::Session session = connect_in_child(daemon.socket_path());
      const auto lease = session.acquire("a");
      expect(lease.ok() && lease->verify().ok(), "verify");
      parent.say("reading");
      parent.hear();
      if (is_faulty) {
        const OwnFaults fault("device_lost");
        expect(code_of(lease->verify()) == POLYKV_ERR_DEVICE_LOST, "verify without a GPU");
        expect(lease->tokens().ok(), "tokens");
        parent.say("failed");
        parent.hear();
        std::_Exit(0);  // its context is of no use any more
      }
      expect(lease->verify().ok(), "verify again");
    });
  };
  const auto faulty = start(true);
  const auto other = start(false);
  REQUIRE(faulty->hear() == "reading");
  REQUIRE(other->hear() == "reading");
  faulty->say("fail");
  REQUIRE(faulty->hear() == "failed");
  other->say("go on");
  CHECK(other->succeeds());
  RawClient client(daemon.socket_path());
  client.publish(document_number(2), "b");
  CHECK(status_of(client).lease_count == 1);
  faulty->say("exit");
  CHECK(faulty->succeeds());
  CHECK(client.remove("a").code() == POLYKV_OK);
  wait_for_live_count(bench, 1);
}

TEST_CASE("row 17: a segment that was not opened before the daemon died is never opened after") {
  const CudaBench bench;
  DaemonProcess daemon(bench.device().flags());
  publish(daemon, TestDocument(), "a");
  ChildProcess agent([&](const Channel& parent) {
    client::Session session = connect_in_child(daemon.socket_path());
    const client::Lease lease = std::move(*session.acquire("a"));
    parent.say("leased");
    parent.hear();
    expect(code_of(lease.verify()) == POLYKV_ERR_DAEMON_GONE, "verify");
  });
  REQUIRE(agent.hear() == "leased");
  daemon.kill();
  daemon.restart(bench.device().flags());
  const uint64_t opened = bench.device().state()->open_total;
  publish(daemon, document_number(3), "a");
  agent.say("go on");
  CHECK(agent.succeeds());
  CHECK(bench.device().state()->open_total == opened);
}

TEST_CASE("row 10: rounds of connect, read and kill leave no device memory and no importer") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  publish(daemon, TestDocument(), "a");
  RawClient client(daemon.socket_path());
  const size_t descriptors = daemon.open_descriptor_count();
  for (int round = 0; round < 20; ++round) {
    ChildProcess agent([&](const Channel& parent) {
      client::Session session = connect_in_child(daemon.socket_path());
      const auto lease = session.acquire("a");
      expect(lease.ok() && lease->verify().ok(), "verify");
      parent.say("reading");
      parent.hear();
    });
    REQUIRE(agent.hear() == "reading");
    CHECK(agent.kill().was_killed);
  }
  while (status_of(client).lease_count != 0) std::this_thread::yield();
  CHECK(importers(bench) == 0);
  CHECK(bench.device().state()->live_count() == 1);
  // The publisher's own may still have been among those.
  CHECK(daemon.open_descriptor_count() <= descriptors);
}

TEST_CASE("row 38: another user is refused before any handle is sent, and host memory offered") {
  if (::geteuid() != 0) return;  // only root can become another user
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  publish(daemon, TestDocument(), "a");
  ChildProcess other([&](const Channel&) {
    become_user(12345);
    RawClient client(daemon.socket_path());
    AcquireFields fields;
    fields.name = "a";
    const Reply known = client.acquire(fields);
    fields.name = "never";
    const Reply unknown = client.acquire(fields);
    expect(known.code() == POLYKV_ERR_PERMISSION, "refused");
    expect(known.message() == unknown.message(), "nothing is told of what there is");
    expect(known.message().find("--backing memfd") != std::string::npos, "host memory");
    const TestDocument own = document_number(5);
    fields = {};
    fields.may_produce = true;
    expect(client.acquire(fields, &own).code() == POLYKV_ERR_PERMISSION, "may not produce either");
    expect(client.status().code() == POLYKV_OK, "the connection is fine");
  });
  CHECK(other.succeeds());
}
