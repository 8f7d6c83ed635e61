// Documents in the memory of a real GPU, and processes that share it: read by kernels, killed on either side, damaged.
// The test's own process never uses the GPU: a forked child of one that has could not. Without a GPU, or with one whose
// memory processes cannot share, it says why and exits with 77.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdio>
#include <thread>

#include "device/library.h"
#include "polykv/cuda.h"
#include "tests/support/child_process.h"
#include "tests/support/gpu_sharing.h"
#include "tests/support/require_ok.h"
#include "tests/support/synthetic_document.h"

using namespace polykv;
using namespace polykv::test;

namespace {

/// A program that was taken to another machine finds it elsewhere than where it was built.
std::string library_path() {
  const char* elsewhere = std::getenv("POLYKV_TEST_CUDA_LIBRARY");
  return elsewhere == nullptr ? POLYKV_CUDA_LIBRARY_PATH : elsewhere;
}

[[noreturn]] void unavailable(const std::string& why) {
  std::printf("unavailable: %s\n", why.c_str());
  std::fflush(stdout);
  std::_Exit(77);
}

/// Before any test: which GPU there is, is asked in a child as well. On the emulation (tests run there too, so that
/// this program is right when it meets a GPU) it is this program's own.
const bool kHasGpu = [] {
#ifdef POLYKV_ON_EMULATION
  static const EmulatedDevice device;
  device.use_here();
#else
  ::setenv("POLYKV_CUDA_LIBRARY", library_path().c_str(), 1);
#endif
  const pid_t pid = ::fork();
  if (pid != 0) {
    const ExitStatus found = wait_for_exit(pid);
    if (found.was_killed || found.code != 0) std::_Exit(found.was_killed ? 1 : found.code);
    const std::string problem = why_memory_is_not_shared(library_path());
    if (!problem.empty()) unavailable(problem);
    return true;
  }
  const auto runtime = device::load_runtime(library_path());
  const auto devices = runtime.is_ok() ? (*runtime)->devices() : runtime.status();
  if (devices.is_ok() && !devices->empty()) std::_Exit(0);
  unavailable("no GPU that CUDA can use: " +
              (devices.is_ok() ? std::string("none found") : devices.status().message()));
}();

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what + ": " + polykv_last_error());
}
void expect(const Status& status) {
  if (!status.is_ok()) throw std::runtime_error(status.message());
}

device::Runtime& runtime_in_child() {
  const auto runtime = device::load_runtime(library_path());
  expect(runtime.status());
  expect((*runtime)->use_device(0));
  return **runtime;
}

std::vector<std::string> flags() {
  return {"--backing", "cuda",   "--cuda-library", library_path(),
          "--budget",  "256MiB", "--cuda-reserve", "0"};
}

client::Session connect_in_child(const std::string& socket_path) {
  client::ConnectOptions options;
  options.socket_path = socket_path.c_str();
  auto session = client::Session::connect(options);
  expect(session.ok(), "connect");
  return std::move(*session);
}

SyntheticDocument the_document() {
  SyntheticDocument document(700);
  document.profile = POLYKV_PROFILE_K5V4;
  return document;
}

/// In a child: decodes layer 0 by kernels and by the CPU, and compares.
void read_by_kernels(const client::Lease& lease, const SyntheticDocument& document) {
  device::Runtime& runtime = runtime_in_child();
  const uint64_t tokens = document.tokens.size();
  const size_t count = tokens * document.layers[0].kv_head_count * document.layers[0].k_head_dim;
  const auto memory = runtime.allocate(device::round_up(count * sizeof(float)));
  expect(memory.status());
  polykv_decode_options options;
  polykv_decode_options_init(&options);
  options.token_count = tokens;
  options.dtype = POLYKV_F32;
  options.k = *memory;
  polykv_cuda_queue queue;
  polykv_cuda_queue_init(&queue);
  expect(polykv_cuda_layer_decode(lease.get(), 0, &options, &queue) == POLYKV_OK, "decode");
  expect(runtime.synchronize_device());
  std::vector<float> got(count);
  expect(runtime.copy_to_host(got.data(), *memory, count * sizeof(float)));
  std::vector<float> want(count);
  options.k = want.data();
  expect(polykv_layer_decode(lease.get(), 0, &options) == POLYKV_OK, "decode on the CPU");
  for (size_t i = 0; i < count; ++i)
    expect(std::abs(got[i] - want[i]) <= 1e-5F, "the kernel's value " + std::to_string(i));
  expect(runtime.free(*memory));
}

void publish(const DaemonProcess& daemon, const SyntheticDocument& document) {
  ChildProcess producer([&](const Channel&) {
    client::Session session = connect_in_child(daemon.socket_path());
    document.publish(session, "a", 300);
  });
  REQUIRE(producer.succeeds());
}

uint64_t live_segments(const DaemonProcess& daemon) {
  client::Session session = connect_in_child(daemon.socket_path());
  return session.daemon_status()->segment_count + session.daemon_status()->retiring_bytes;
}

}  // namespace

TEST_CASE("a GPU producer's document is read by kernels of eight processes at once") {
  const DaemonProcess daemon(flags());
  const SyntheticDocument document = the_document();
  ChildProcess producer([&](const Channel&) {
    client::Session session = connect_in_child(daemon.socket_path());
    const client::Model model = document.model();
    auto acquired = session.acquire_or_produce(document.options(model, "a"));
    expect(acquired.ok(), "produce");
    auto publisher = std::get<client::Publisher>(std::move(*acquired));
    polykv_segment* begun = nullptr;
    expect(polykv_cuda_segment_begin(publisher.get(), 700, &begun) == POLYKV_OK, "begin");
    client::Segment segment(begun);
    device::Runtime& runtime = runtime_in_child();
    for (uint32_t layer = 0; layer < document.layers.size(); ++layer) {
      const std::vector<float> k = document.values(false, layer, 0, 700);
      const std::vector<float> v = document.values(true, layer, 0, 700);
      uint64_t bytes = 0;
      expect(polykv_cuda_encode_workspace_bytes(begun, layer, &bytes) == POLYKV_OK, "ask");
      void* memory[3];
      const size_t sizes[3] = {k.size() * sizeof(float), v.size() * sizeof(float), bytes};
      for (int i = 0; i < 3; ++i) {
        const auto allocated = runtime.allocate(device::round_up(sizes[i]));
        expect(allocated.status());
        memory[i] = *allocated;
      }
      expect(runtime.copy_to_device(memory[0], k.data(), sizes[0]));
      expect(runtime.copy_to_device(memory[1], v.data(), sizes[1]));
      client::KvSource source;
      source.k = memory[0];
      source.v = memory[1];
      polykv_cuda_queue queue;
      polykv_cuda_queue_init(&queue);
      expect(polykv_cuda_segment_encode_layer(begun, layer, &source, &queue, memory[2], bytes) ==
                 POLYKV_OK,
             "encode");
      for (void* const pointer : memory) expect(runtime.free(pointer));
    }
    expect(segment.commit().ok(), "commit");
    expect(publisher.finish().ok(), "finish");
  });
  REQUIRE(producer.succeeds());
  std::vector<std::unique_ptr<ChildProcess>> agents;
  for (int i = 0; i < 8; ++i) {
    agents.push_back(std::make_unique<ChildProcess>([&](const Channel& parent) {
      client::Session session = connect_in_child(daemon.socket_path());
      const auto lease = session.acquire("a");
      expect(lease.ok() && lease->verify().ok(), "verify");
      read_by_kernels(*lease, document);
      parent.say("read");
      parent.hear();
      read_by_kernels(*lease, document);
    }));
  }
  for (const auto& agent : agents) CHECK(agent->hear() == "read");
  for (const auto& agent : agents) agent->say("again");
  for (const auto& agent : agents) CHECK(agent->succeeds());
}

TEST_CASE("an agent that is killed in the middle disturbs neither the daemon nor other agents") {
  const DaemonProcess daemon(flags());
  const SyntheticDocument document = the_document();
  publish(daemon, document);
  const auto read = [&](const Channel& parent) {
    client::Session session = connect_in_child(daemon.socket_path());
    const auto lease = session.acquire("a");
    expect(lease.ok(), "acquire");
    read_by_kernels(*lease, document);
    parent.say("reading");
    parent.hear();
    read_by_kernels(*lease, document);
  };
  ChildProcess victim(read);
  ChildProcess other(read);
  REQUIRE(victim.hear() == "reading");
  REQUIRE(other.hear() == "reading");
  CHECK(victim.kill().was_killed);
  other.say("again");
  CHECK(other.succeeds());
  // Removed, its memory goes once nobody has it open.
  client::Session session = connect_in_child(daemon.socket_path());
  REQUIRE_OK(session.remove("a"));
  while (live_segments(daemon) != 0) std::this_thread::yield();
}

TEST_CASE("when the daemon is killed an agent's calls say so, and a new daemon serves anew") {
  DaemonProcess daemon(flags());
  const SyntheticDocument document = the_document();
  publish(daemon, document);
  ChildProcess agent([&](const Channel& parent) {
    client::Session session = connect_in_child(daemon.socket_path());
    const auto lease = session.acquire("a");
    expect(lease.ok(), "acquire");
    read_by_kernels(*lease, document);
    parent.say("reading");
    parent.hear();
    polykv_cuda_layer_view view;
    polykv_cuda_layer_view_init(&view);
    expect(polykv_cuda_lease_layer_view(lease->get(), 0, 0, -1, &view) == POLYKV_ERR_DAEMON_GONE,
           "a view after the daemon's death");
  });
  REQUIRE(agent.hear() == "reading");
  daemon.kill();
  agent.say("it is gone");
  CHECK(agent.succeeds());
  daemon.restart(flags());
  publish(daemon, document);
  ChildProcess next([&](const Channel&) {
    client::Session session = connect_in_child(daemon.socket_path());
    const auto lease = session.acquire("a");
    expect(lease.ok(), "acquire");
    read_by_kernels(*lease, document);
  });
  CHECK(next.succeeds());
}

TEST_CASE("verify finds what an importer wrote") {
  const DaemonProcess daemon(flags());
  const SyntheticDocument document = the_document();
  publish(daemon, document);
  ChildProcess vandal([&](const Channel&) {
    client::Session session = connect_in_child(daemon.socket_path());
    const auto lease = session.acquire("a");
    expect(lease.ok() && lease->verify().ok(), "verify");
    polykv_cuda_layer_view view;
    polykv_cuda_layer_view_init(&view);
    expect(polykv_cuda_lease_layer_view(lease->get(), 1, 1, -1, &view) == POLYKV_OK, "view");
    auto* const byte = static_cast<uint8_t*>(const_cast<void*>(view.payload)) + 100;
    uint8_t value = 0;
    expect(runtime_in_child().copy_to_host(&value, byte, 1));
    value = static_cast<uint8_t>(~value);
    expect(runtime_in_child().copy_to_device(byte, &value, 1));
    expect(!lease->verify().ok(), "verify the damage");
  });
  CHECK(vandal.succeeds());
}
