// Documents in device memory when something is wrong. Numbers are rows of the failure checklist.
#include <atomic>
#include <catch2/catch.hpp>
#include <thread>

#include "tests/support/cuda_bench.h"
#include "tests/support/raw_client.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr const char* kFirstUuid = "GPU-e0000000-0000-0000-0000-000000000001";
constexpr const char* kSecondUuid = "GPU-e0000000-0000-0000-0000-000000000002";

polykv_status code_of(const auto& result) {
  return result.ok() ? POLYKV_OK : result.error().status;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// What this process sees of the GPUs, until it is destroyed.
struct VisibleDevices {
  explicit VisibleDevices(const char* order) { ::setenv("CUDA_VISIBLE_DEVICES", order, 1); }
  ~VisibleDevices() { ::unsetenv("CUDA_VISIBLE_DEVICES"); }
};

polykv_status view_code(const client::Lease& lease, int device, std::string& message) {
  polykv_cuda_layer_view view;
  polykv_cuda_layer_view_init(&view);
  const polykv_status status = polykv_cuda_lease_layer_view(lease.get(), 0, 0, device, &view);
  message = polykv_last_error();
  return status;
}

/// A reservation by a producer that writes to device memory itself; from token 0 on.
Reply reserve_on_gpu(RawClient& client, const wire::Handle& ticket, uint64_t token_count) {
  flatbuffers::FlatBufferBuilder builder;
  wire::SegmentReserveBuilder reserve(builder);
  reserve.add_ticket(&ticket);
  reserve.add_token_count(token_count);
  reserve.add_into_device(true);
  return client.receive(client.send(builder, reserve.Finish()));
}

}  // namespace

TEST_CASE("row 24: GPUs are matched by UUID, whatever numbers a process gives them") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags({"--cuda-device", kSecondUuid}));
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  {
    const client::Lease lease = document.publish(session, "a");
    CHECK(cuda_view(lease, 0, 0).device == 1);
  }
  {
    const VisibleDevices reordered("1,0");
    const auto lease = session.acquire("a");
    CHECK(cuda_view(*lease, 0, 0).device == 0);
    CHECK(document.worst_error(*lease) == 0);
  }
  const VisibleDevices hidden("0");
  const auto lease = session.acquire("a");
  std::string message;
  CHECK(view_code(*lease, -1, message) == POLYKV_ERR_WRONG_DEVICE);
  CHECK(contains(message, kFirstUuid));
  CHECK(contains(message, kSecondUuid));
  CHECK(*lease->tokens() == document.tokens);  // those need no GPU
}

TEST_CASE("row 25: another GPU reads it with peer access, and is refused by name without") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const client::Lease lease = SyntheticDocument(300).publish(session, "a");
  CHECK(cuda_view(lease, 0, 0, 1).device == 0);
  bench.device().set_faults("no_peer_access");
  std::string message;
  CHECK(view_code(lease, 1, message) == POLYKV_ERR_WRONG_DEVICE);
  CHECK(contains(message, kFirstUuid));
  CHECK(contains(message, kSecondUuid));
  CHECK(view_code(lease, 5, message) == POLYKV_ERR_WRONG_DEVICE);
  CHECK(view_code(lease, 0, message) == POLYKV_OK);
}

TEST_CASE("row 28: threads that open and close the same segments do not disturb each other") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  { const client::Lease lease = document.publish(session, "a", 100); }
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 15; ++round) {
        auto lease = session.acquire("a");
        polykv_cuda_layer_view view;
        polykv_cuda_layer_view_init(&view);
        if (!lease || polykv_cuda_lease_layer_view(lease->get(), 1, 0, -1, &view) != POLYKV_OK ||
            !lease->verify()) {
          ++failures;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  const auto state = bench.device().state();
  for (const EmulatedAllocation& allocation : state->allocations)
    CHECK(allocation.importer_count() == 0);
}

TEST_CASE("row 29: a thread that never used the GPU may read and release") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  client::Lease lease = document.publish(session, "a");
  cuda_view(lease, 0, 0);
  std::thread reader([&] {
    if (!lease.verify()) throw std::runtime_error("verify");
  });
  reader.join();
  std::thread releaser([&] {
    if (!lease.release()) throw std::runtime_error("release");
  });
  releaser.join();
  // A violation if no device was current on one of them: ~CudaBench checks.
}

TEST_CASE("row 30: allocations are multiples of 2 MiB and zero before anybody gets them") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  RawClient client(daemon.socket_path());
  const TestDocument document;
  const Reply reply = reserve_on_gpu(client, client.become_producer(document, "a"), 300);
  const auto* memory = reply.as<wire::SegmentReserved>().device_memory();
  REQUIRE(memory != nullptr);
  CHECK(memory->size_bytes() == device::kGranularityBytes);
  CHECK(memory->epoch() == client.epoch());
  const auto state = bench.device().state();
  REQUIRE(state->live_count() == 1);
  std::ifstream file(bench.device().memory_file(state->next_id - 1), std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  CHECK((bytes == std::string(device::kGranularityBytes, '\0')));
}

TEST_CASE("row 37: a payload that has not arrived in device memory is not committed") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  RawClient client(daemon.socket_path());
  const TestDocument document;
  const wire::Handle ticket = client.become_producer(document, "a");
  for (const bool has_arrived : {false, true}) {
    const Reply reply = reserve_on_gpu(client, ticket, 300);
    const auto& reserved = reply.as<wire::SegmentReserved>();
    AlignedBytes segment(reserved.size_bytes());
    RawClient::write_segment(reserved, document, 0, 300, segment.span());
    const auto metadata_bytes =
        static_cast<size_t>(::lseek(reply.received.fds.at(0).get(), 0, SEEK_END));
    {
      const Mapping metadata =
          take(Mapping::map(reply.received.fds.at(0).get(), metadata_bytes, MapAccess::read_write));
      std::copy_n(segment.span().begin(), metadata_bytes, metadata.writable_bytes().begin());
    }
    if (has_arrived) {
      const std::string path = bench.device().memory_file(bench.device().state()->next_id - 1);
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.write(reinterpret_cast<const char*>(segment.span().data()) + metadata_bytes,
                 static_cast<std::streamsize>(segment.span().size() - metadata_bytes));
    }
    CHECK(client.commit(*reserved.segment()).code() ==
          (has_arrived ? POLYKV_OK : POLYKV_ERR_CORRUPT));
  }
  client::Session session = connect_to(daemon.socket_path());
  CHECK_OK(session.acquire("a")->verify());
}

TEST_CASE("row 31: device memory that is short is told with needed and free, and others go on") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags({"--cuda-reserve", "8MiB", "--budget", "1GiB"}));
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  const SyntheticDocument other(300, 2);
  const client::Lease lease = document.publish(session, "a");
  const uint64_t used = device::kGranularityBytes;
  const auto leave_free = [&](uint64_t bytes) {
    bench.device().change(
        [&](EmulatedState& state) { state.foreign_bytes = state.device_bytes - used - bytes; });
  };
  client::Publisher publisher = other.become_producer(session, "b");
  // Less than the reserve and a segment: a program that is not ours needs it.
  leave_free(uint64_t{9} << 20);
  const auto refused = publisher.begin_segment(300);
  CHECK(code_of(refused) == POLYKV_ERR_BUDGET);
  INFO(refused.error().message);
  CHECK(contains(refused.error().message, "2097152 bytes needed"));
  CHECK(contains(refused.error().message, "1048576 free of device memory of Emulated GPU 0"));
  CHECK(document.worst_error(lease) == 0);
  CHECK_OK(lease.verify());
  // The ticket is still good.
  leave_free(uint64_t{10} << 20);
  other.publish_segment(publisher, 300);
  CHECK_OK(publisher.finish());
}

TEST_CASE("row 41: host memory that a segment needs on its way to the GPU is asked for as well") {
  const CudaBench bench;
  const TemporaryFolder folder;
  const std::string meminfo = folder.write("meminfo", "MemAvailable: 65600 kB\n");
  const DaemonProcess daemon(
      bench.device().flags({"--proc-meminfo", meminfo, "--memory-reserve", "64MiB"}));
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  client::Publisher publisher = document.become_producer(session, "a");
  const auto refused = publisher.begin_segment(300);
  CHECK(code_of(refused) == POLYKV_ERR_BUDGET);
  INFO(refused.error().message);
  CHECK(contains(refused.error().message, "host memory needed until the segment is on the GPU"));
  CHECK(bench.device().state()->live_count() == 0);
  // One that writes to device memory itself needs next to none of the host's.
  client::Segment segment = begin_on_gpu(publisher, 300);
  REQUIRE_OK(document.encode_all(segment, 0, 300));
  CHECK_OK(segment.commit());
}

TEST_CASE("row 31: an idle document goes before device memory is refused") {
  const CudaBench bench;
  const uint64_t room = 2 * device::kGranularityBytes;
  const bool is_budget_short = GENERATE(true, false);
  const DaemonProcess daemon(
      bench.device().flags({"--budget", is_budget_short ? std::to_string(room) : "512MiB"}));
  if (!is_budget_short) {
    bench.device().change(
        [&](EmulatedState& state) { state.foreign_bytes = state.device_bytes - room; });
  }
  client::Session session = connect_to(daemon.socket_path());
  for (uint32_t seed = 1; seed <= 3; ++seed)
    SyntheticDocument(300, seed).publish(session, std::to_string(seed).c_str());
  CHECK(code_of(session.acquire("1")) == POLYKV_ERR_NOT_FOUND);
  CHECK_OK(session.acquire("3"));
  CHECK(session.daemon_status()->evicted_documents_total == 1);
  CHECK(bench.device().state()->live_count() == 2);
}

TEST_CASE("row 31: a driver that is out of memory after all is the same error") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  client::Publisher publisher = document.become_producer(session, "a");
  bench.device().set_faults("out_of_memory");
  const auto refused = publisher.begin_segment(300);
  CHECK(code_of(refused) == POLYKV_ERR_BUDGET);
  bench.device().set_faults("");
  document.publish_segment(publisher, 300);
  CHECK(session.daemon_status()->stored_bytes == device::kGranularityBytes);
}

TEST_CASE("row 32: a lost GPU ends the daemon with its status, and every lease says so") {
  const CudaBench bench;
  DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  client::Lease lease = document.publish(session, "a");
  cuda_view(lease, 0, 0);
  bench.device().set_faults("device_lost");
  const ExitStatus status = daemon.wait();  // nobody asked for anything
  CHECK(!status.was_killed);
  CHECK(status.code == POLYKV_ERR_DEVICE_LOST);
  CHECK(contains(daemon.log(), "fallen off the bus"));
  CHECK(!contains(daemon.log(), "does not answer"));  // the first call told it
  bench.device().set_faults("");
  std::string message;
  CHECK(view_code(lease, -1, message) == POLYKV_ERR_DEVICE_LOST);
  CHECK(code_of(lease.verify()) == POLYKV_ERR_DEVICE_LOST);
  CHECK(document.worst_error(lease) == INFINITY);  // nothing was read
  CHECK(code_of(session.daemon_status()) == POLYKV_ERR_DEVICE_LOST);
  CHECK(*lease.tokens() == document.tokens);
}

TEST_CASE(
    "row 32: a GPU that does not answer any more is lost as well, whatever the driver calls it") {
  const CudaBench bench;
  DaemonProcess daemon(bench.device().flags());
  bench.device().set_faults("memory_unknown");
  CHECK(daemon.wait().code == POLYKV_ERR_DEVICE_LOST);
  CHECK(contains(daemon.log(), "does not answer"));
  bench.device().set_faults("");
}

TEST_CASE("row 34: another driver in the client than in the daemon is refused, and both are told") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const client::Lease lease = SyntheticDocument(300).publish(session, "a");
  bench.device().set_faults("other_driver");
  std::string message;
  CHECK(view_code(lease, -1, message) == POLYKV_ERR_VERSION);
  CHECK(contains(message, "12.8"));
  CHECK(contains(message, "13.0"));
}

TEST_CASE("row 36: verify finds what a process wrote to a segment that it had open") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(600);
  const client::Lease lease = document.publish(session, "a", 300);
  const uint64_t second_segment = bench.device().state()->next_id - 1;
  CHECK_OK(lease.verify());
  bench.device().damage(second_segment, 100);
  const auto verified = lease.verify();
  CHECK(code_of(verified) == POLYKV_ERR_CORRUPT);
  CHECK(contains(verified.error().message, "segment 1"));
  CHECK(contains(verified.error().message, "layer 0"));
  bench.device().damage(second_segment, 100);  // back
  CHECK_OK(lease.verify());
}

TEST_CASE("row 37: memory is closed after the streams that read it, named or not") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  { const client::Lease published = SyntheticDocument(300).publish(session, "a"); }
  const auto release_while_busy = [&](const auto& release) {
    client::AcquireOptions options;
    options.name = "a";
    polykv_lease* lease = nullptr;
    REQUIRE(polykv_document_acquire(session.get(), &options, &lease, nullptr) == POLYKV_OK);
    polykv_cuda_layer_view view;
    polykv_cuda_layer_view_init(&view);
    REQUIRE(polykv_cuda_lease_layer_view(lease, 0, 0, -1, &view) == POLYKV_OK);
    const auto stream = runtime_here().create_stream();
    REQUIRE_OK(stream);
    keep_busy(*stream, view.payload);
    void* const streams[] = {*stream};
    CHECK(release(lease, streams) == POLYKV_OK);
    CHECK_OK(runtime_here().destroy_stream(*stream));
  };
  {
    // It is open for another lease as well, and not closed: a stream that is named is waited for all the same.
    const auto kept = session.acquire("a");
    const polykv_cuda_layer_view view = cuda_view(*kept, 0, 0);
    release_while_busy([&](polykv_lease* lease, void* const* streams) {
      const polykv_status released = polykv_cuda_lease_release(lease, streams, 1);
      uint8_t byte = 0;
      CHECK_OK(runtime_here().copy_to_host(&byte, view.payload, 1));
      return released;
    });
  }
  release_while_busy([](polykv_lease* lease, void* const* streams) {
    return polykv_cuda_lease_release(lease, streams, 1);
  });
  release_while_busy([](polykv_lease* lease, void* const*) { return polykv_lease_release(lease); });
  // A violation if the segment had been closed while a stream was busy: ~CudaBench checks.
}

TEST_CASE("a client that speaks protocol version 1 may publish, and is told why it may not read") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  RawClient old(daemon.socket_path(), false);
  old.shake_hands(1, 1);
  old.publish(TestDocument(), "a");
  AcquireFields fields;
  fields.name = "a";
  const Reply refused = old.acquire(fields);
  CHECK(refused.code() == POLYKV_ERR_VERSION);
  CHECK(contains(refused.message(), "version 2"));
  client::Session session = connect_to(daemon.socket_path());
  CHECK_OK(session.acquire("a")->verify());
}
