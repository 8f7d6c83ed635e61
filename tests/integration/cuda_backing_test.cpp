// Documents in device memory: publish, lease, read, release; on an emulated GPU, with the real daemon.
// The numbers are rows of the failure checklist.
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>

#include "polykv/cuda.h"
#include "tests/support/child_process.h"
#include "tests/support/cuda_bench.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

TEST_CASE("what was published from host memory is in device memory, and reads back the same") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(1000);
  const client::Lease lease = document.publish(session, "a", 300);
  CHECK(lease.info().backing == std::string("cuda"));
  CHECK(lease.info().segment_count == 4);
  // Four allocations of 2 MiB, which is what the document is said to take.
  CHECK(bench.device().state()->live_count() == 4);
  CHECK(lease.info().stored_bytes == 4 * device::kGranularityBytes);
  CHECK(*lease.tokens() == document.tokens);
  CHECK(bench.device().state()->open_total == 1);  // the probe's: facts and tokens need no GPU
  CHECK(document.worst_error(lease) == 0);
  CHECK_OK(lease.verify());
  CHECK(bench.device().state()->open_total == 5);
  const client::DaemonStatus status = *session.daemon_status();
  CHECK(status.backing == std::string("cuda"));
  CHECK(status.device_name == std::string("Emulated GPU 0"));
  CHECK(status.device_total_bytes == uint64_t{1} << 30);
  CHECK(status.budget_bytes == uint64_t{1} << 29);
}

TEST_CASE("a producer on the GPU writes the payload itself, and polykvd verifies what arrived") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(600);
  client::Publisher publisher = document.become_producer(session, "a");
  for (const uint64_t first : {0, 300}) {
    client::Segment segment = begin_on_gpu(publisher, 300);
    REQUIRE_OK(document.encode_all(segment, first, 300));
    REQUIRE_OK(segment.commit());
  }
  const auto lease = publisher.finish_with_lease();
  REQUIRE_OK(lease);
  CHECK(document.worst_error(*lease) == 0);
  CHECK_OK(lease->verify());
}

TEST_CASE("device memory of a removed document is free once nobody holds it") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  client::Lease lease = document.publish(session, "a");
  CHECK(document.worst_error(lease) == 0);
  REQUIRE_OK(session.remove("a"));
  // Still held, and readable.
  CHECK(session.daemon_status()->retiring_bytes == device::kGranularityBytes);
  CHECK(bench.device().state()->live_count() == 1);
  CHECK_OK(lease.verify());
  REQUIRE_OK(lease.release());
  CHECK(session.daemon_status()->retiring_bytes == 0);
  // Freed by the device's thread, which the next allocation comes after.
  const SyntheticDocument other(300, 2);
  const client::Lease next = other.publish(session, "b");
  CHECK(bench.device().state()->live_count() == 1);
}

TEST_CASE("views tell where a layer is in device memory, and the bytes are the segment's") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(500);
  document.profile = POLYKV_PROFILE_K8V8;
  const client::Lease lease = document.publish(session, "a", 300);
  for (uint32_t segment = 0; segment < 2; ++segment) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const polykv_cuda_layer_view on_gpu = cuda_view(lease, segment, layer);
      const auto on_host = lease.layer_view(segment, layer);
      REQUIRE_OK(on_host);
      CHECK(on_gpu.first_token == on_host->first_token);
      CHECK(on_gpu.token_count == on_host->token_count);
      CHECK(on_gpu.profile == on_host->profile);
      REQUIRE(on_gpu.payload_bytes == on_host->payload_bytes);
      // The emulation's device memory can be looked at.
      CHECK(std::memcmp(on_gpu.payload, on_host->payload, on_gpu.payload_bytes) == 0);
    }
  }
  polykv_cuda_device device;
  polykv_cuda_device_init(&device);
  REQUIRE(polykv_cuda_lease_device(lease.get(), &device) == POLYKV_OK);
  CHECK(device.index == 0);
  CHECK(std::string(device.uuid) == "GPU-e0000000-0000-0000-0000-000000000001");
}

TEST_CASE("row 26: a segment is opened once in a process, however many leases there are") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  const client::Lease first = document.publish(session, "a");
  client::Session other_session = connect_to(daemon.socket_path());
  auto second = other_session.acquire("a");
  REQUIRE_OK(second);
  const polykv_cuda_layer_view view = cuda_view(first, 0, 0);
  const uint64_t opened = bench.device().state()->open_total;
  CHECK(cuda_view(*second, 0, 0).payload == view.payload);
  CHECK(bench.device().state()->open_total == opened);
  REQUIRE_OK(second->release());
  CHECK(document.worst_error(first) == 0);  // still open
}

#ifndef __SANITIZE_THREAD__  // whose own memory would be counted as well
TEST_CASE("a lease on device memory takes host memory for what is read on the host alone") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(8192);
  const client::Lease published = document.publish(session, "a");
  // What RLIMIT_DATA counts, which bounds polykv-prefill.
  const auto private_bytes = [] {
    std::ifstream file("/proc/self/statm");
    int64_t pages = 0;
    for (int i = 0; i < 6; ++i) file >> pages;
    return pages * ::sysconf(_SC_PAGESIZE);
  };
  CHECK_OK(published.verify());  // what the kernels' emulation keeps is there then
  const int64_t before = private_bytes();
  const auto lease = session.acquire("a");
  REQUIRE_OK(lease);
  cuda_view(*lease, 0, 0);
  CHECK_OK(lease->verify());
  const auto stored = static_cast<int64_t>(lease->info().stored_bytes);
  REQUIRE(stored >= int64_t{10} << 20);
  CHECK(private_bytes() - before < stored / 10);
  REQUIRE_OK(lease->layer_view(0, 1));
  REQUIRE_OK(lease->layer_view(1, 1));
  CHECK(private_bytes() - before > stored / 5);
  CHECK(document.worst_error(*lease) == 0);
}
#endif

TEST_CASE("a document in host memory is staged to the caller's device memory and viewed there") {
  const CudaBench bench;
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(500);
  client::Lease lease = document.publish(session, "a", 300);
  polykv_cuda_layer_view view;
  polykv_cuda_layer_view_init(&view);
  CHECK(polykv_cuda_lease_layer_view(lease.get(), 0, 0, -1, &view) == POLYKV_ERR_UNSUPPORTED);
  uint64_t needed = 0;
  REQUIRE(polykv_cuda_lease_staging_bytes(lease.get(), &needed) == POLYKV_OK);
  const DeviceBuffer buffer(bench, needed);
  CHECK(polykv_cuda_lease_stage(lease.get(), 0, buffer.get(), needed - 1) ==
        POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(polykv_cuda_lease_stage(lease.get(), 7, buffer.get(), needed) == POLYKV_ERR_WRONG_DEVICE);
  REQUIRE(polykv_cuda_lease_stage(lease.get(), 0, buffer.get(), needed) == POLYKV_OK);
  for (uint32_t segment = 0; segment < 2; ++segment) {
    const polykv_cuda_layer_view staged = cuda_view(lease, segment, 1);
    const auto on_host = lease.layer_view(segment, 1);
    REQUIRE(staged.payload_bytes == on_host->payload_bytes);
    CHECK(std::memcmp(staged.payload, on_host->payload, staged.payload_bytes) == 0);
  }
}

TEST_CASE("a document in device memory is not staged, and host memory takes no GPU producer") {
  const CudaBench bench;
  const SyntheticDocument document(300);
  uint64_t needed = 0;
  {
    const DaemonProcess daemon(bench.device().flags());
    client::Session session = connect_to(daemon.socket_path());
    const client::Lease lease = document.publish(session, "a");
    CHECK(polykv_cuda_lease_staging_bytes(lease.get(), &needed) == POLYKV_ERR_UNSUPPORTED);
  }
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  client::Publisher publisher = document.become_producer(session, "a");
  polykv_segment* segment = nullptr;
  CHECK(polykv_cuda_segment_begin(publisher.get(), 300, &segment) == POLYKV_ERR_UNSUPPORTED);
  CHECK(std::string(polykv_last_error()).find("host memory") != std::string::npos);
  document.publish_segment(publisher);  // as before
}
