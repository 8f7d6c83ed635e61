// polykvd with documents in the memory of a real GPU, and processes that read them. Skipped, with the
// cause, where there is none. The test's own process uses the GPU in its children alone.
#include <catch2/catch.hpp>
#include <thread>

#include "device/library.h"
#include "polykv/cuda.h"
#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/synthetic_document.h"

using namespace polykv;
using namespace polykv::test;

namespace {

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what + ": " + polykv_last_error());
}

const std::vector<std::string> kFlags = {
    "--backing", "cuda", "--cuda-library", POLYKV_REAL_CUDA_LIBRARY, "--budget", "1GiB"};

/// Ends the program with 77 where no GPU can be used.
void skip_without_gpu() {
  ::setenv("POLYKV_CUDA_LIBRARY", POLYKV_REAL_CUDA_LIBRARY, 1);
  ChildProcess child([](const Channel& parent) {
    const auto runtime = device::load_runtime(POLYKV_REAL_CUDA_LIBRARY);
    if (!runtime) return parent.say("broken: " + runtime.status().message());
    const auto versions = (*runtime)->versions();
    const auto devices = (*runtime)->devices();
    if (versions && devices && !devices->empty()) return parent.say("a GPU");
    const Status why = versions ? devices.status() : versions.status();
    parent.say(why.code() == POLYKV_ERR_UNSUPPORTED || why.is_ok() ? "none: " + why.message()
                                                                   : "broken: " + why.message());
  });
  const std::string answer = child.hear();
  INFO(answer);
  REQUIRE(answer.find("broken") != 0);
  if (answer == "a GPU") return;
  std::printf("skipped: %s\n", answer.c_str());
  std::fflush(stdout);
  std::_Exit(77);
}

client::Session connect_in_child(const DaemonProcess& daemon) {
  client::ConnectOptions options;
  options.socket_path = daemon.socket_path().c_str();
  auto session = client::Session::connect(options);
  expect(session.ok(), "connect");
  return std::move(*session);
}

void read_all(const client::Lease& lease, const SyntheticDocument& document) {
  expect(lease.verify().ok(), "verify");
  expect(document.worst_error(lease) == 0, "decode");
  polykv_cuda_layer_view view;
  polykv_cuda_layer_view_init(&view);
  expect(polykv_cuda_lease_layer_view(lease.get(), 0, 0, -1, &view) == POLYKV_OK, "view");
  expect(view.payload != nullptr && view.payload_bytes > 0, "view");
}

}  // namespace

TEST_CASE("a document in device memory is published from host and device, read, and freed") {
  skip_without_gpu();
  const DaemonProcess daemon(kFlags);
  const SyntheticDocument from_host(1000);
  const SyntheticDocument from_gpu(600, 2);
  ChildProcess producer([&](const Channel&) {
    client::Session session = connect_in_child(daemon);
    { const client::Lease lease = from_host.publish(session, "host", 300); }
    client::Publisher publisher = from_gpu.become_producer(session, "gpu");
    polykv_segment* begun = nullptr;
    expect(polykv_cuda_segment_begin(publisher.get(), 600, &begun) == POLYKV_OK, "begin");
    client::Segment segment(begun);
    expect(from_gpu.encode_all(segment, 0, 600).ok(), "encode");
    expect(segment.commit().ok(), "commit");
  });
  REQUIRE(producer.succeeds());
  std::vector<std::unique_ptr<ChildProcess>> agents;
  for (int i = 0; i < 4; ++i) {
    agents.push_back(std::make_unique<ChildProcess>([&](const Channel& parent) {
      client::Session session = connect_in_child(daemon);
      const auto host = session.acquire("host");
      const auto gpu = session.acquire("gpu");
      expect(host.ok() && gpu.ok(), "acquire");
      read_all(*host, from_host);
      read_all(*gpu, from_gpu);
      parent.say("read");
      parent.hear();
    }));
  }
  for (const auto& agent : agents) CHECK(agent->hear() == "read");
  client::Session session = connect_to(daemon.socket_path());
  CHECK(session.daemon_status()->stored_bytes == 5 * device::kGranularityBytes);
  REQUIRE(session.remove("host").ok());
  REQUIRE(session.remove("gpu").ok());
  CHECK(session.daemon_status()->retiring_bytes == 5 * device::kGranularityBytes);
  for (const auto& agent : agents) CHECK(agent->kill().was_killed);
  while (session.daemon_status()->retiring_bytes != 0) std::this_thread::yield();
}

TEST_CASE("a killed daemon is told to agents before they read device memory") {
  skip_without_gpu();
  DaemonProcess daemon(kFlags);
  const SyntheticDocument document(600);
  ChildProcess agent([&](const Channel& parent) {
    client::Session session = connect_in_child(daemon);
    const client::Lease lease = document.publish(session, "a");
    expect(lease.verify().ok(), "verify");
    parent.say("read");
    parent.hear();
    const auto verified = lease.verify();
    expect(!verified.ok() && verified.error().status == POLYKV_ERR_DAEMON_GONE, "verify");
  });
  REQUIRE(agent.hear() == "read");
  CHECK(daemon.kill().was_killed);
  agent.say("killed");
  CHECK(agent.succeeds());
  daemon.restart(kFlags);
  ChildProcess next([&](const Channel&) {
    client::Session session = connect_in_child(daemon);
    expect(document.publish(session, "a").verify().ok(), "verify at the next daemon");
  });
  CHECK(next.succeeds());
}
