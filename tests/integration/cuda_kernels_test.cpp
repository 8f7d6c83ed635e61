// Reading on the GPU through libpolykv: an emulated GPU, kernels that it runs, and the real daemon. What comes back is
// compared with what the CPU reads of the same document.
#include <catch2/catch.hpp>
#include <cmath>

#include "polykv/cuda.h"
#include "tests/support/cuda_bench.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr uint32_t kLayer = 1;

polykv_cuda_queue default_queue() {
  polykv_cuda_queue queue;
  polykv_cuda_queue_init(&queue);
  return queue;
}

/// The largest difference, relative to the largest value.
double difference(const std::vector<float>& got, const std::vector<float>& want) {
  double worst = 0;
  double largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    worst = std::max(worst, std::abs(double{got[i]} - want[i]));
    largest = std::max(largest, std::abs(double{want[i]}));
  }
  return worst / largest;
}

std::vector<float> copy_back(const DeviceBuffer& buffer, size_t count) {
  std::vector<float> values(count);
  REQUIRE_OK(runtime_here().copy_to_host(values.data(), buffer.get(), count * sizeof(float)));
  return values;
}

/// K and V of tokens [first, first + count): by kernels, and by the CPU.
void compare_decoding(const CudaBench& bench, const client::Lease& lease, uint64_t first,
                      uint64_t count) {
  const polykv_layer_geometry geometry = lease.info().model->layers[kLayer];
  const size_t k_count = count * geometry.kv_head_count * geometry.k_head_dim;
  const size_t v_count = count * geometry.kv_head_count * geometry.v_head_dim;
  const DeviceBuffer k(bench, k_count * sizeof(float));
  const DeviceBuffer v(bench, v_count * sizeof(float));
  polykv_decode_options options;
  polykv_decode_options_init(&options);
  options.first_token = first;
  options.token_count = count;
  options.dtype = POLYKV_F32;
  options.k = k.get();
  options.v = v.get();
  const polykv_cuda_queue queue = default_queue();
  const polykv_status status = polykv_cuda_layer_decode(lease.get(), kLayer, &options, &queue);
  INFO(polykv_last_error());
  REQUIRE(status == POLYKV_OK);
  std::vector<float> want_k(k_count);
  std::vector<float> want_v(v_count);
  options.k = want_k.data();
  options.v = want_v.data();
  REQUIRE(polykv_layer_decode(lease.get(), kLayer, &options) == POLYKV_OK);
  CHECK(difference(copy_back(k, k_count), want_k) < 1e-6);
  CHECK(difference(copy_back(v, v_count), want_v) < 1e-6);
}

/// Three queries of six heads over tokens [first, first + count), each row from a token of its own on.
void compare_attention(const CudaBench& bench, const client::Lease& lease, uint64_t first,
                       uint64_t count) {
  constexpr uint32_t kQueries = 3;
  const polykv_layer_geometry geometry = lease.info().model->layers[kLayer];
  const uint32_t heads = 3 * geometry.kv_head_count;
  const size_t rows = size_t{kQueries} * heads;
  std::vector<float> q(rows * geometry.k_head_dim);
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.37F * static_cast<float>(i * i % 1009));
  const std::vector<uint64_t> starts = {0, first + count / 3, first + count / 2};
  std::vector<float> want(rows * geometry.v_head_dim);
  std::vector<float> want_sums(rows);
  polykv_attend_options options;
  polykv_attend_options_init(&options);
  options.first_token = first;
  options.token_count = count;
  options.query_count = kQueries;
  options.head_count = heads;
  options.soft_cap = 20;
  options.q = q.data();
  options.query_first_tokens = starts.data();
  options.output = want.data();
  options.log_sum_exp = want_sums.data();
  REQUIRE(polykv_layer_attend(lease.get(), kLayer, &options) == POLYKV_OK);

  const DeviceBuffer device_q(bench, q.size() * sizeof(float));
  const DeviceBuffer device_starts(bench, starts.size() * sizeof(uint64_t));
  const DeviceBuffer output(bench, want.size() * sizeof(float));
  const DeviceBuffer sums(bench, want_sums.size() * sizeof(float));
  device::Runtime& runtime = runtime_here();
  REQUIRE_OK(runtime.copy_to_device(device_q.get(), q.data(), q.size() * sizeof(float)));
  REQUIRE_OK(runtime.copy_to_device(device_starts.get(), starts.data(), starts.size() * 8));
  options.q = device_q.get();
  options.query_first_tokens = static_cast<const uint64_t*>(device_starts.get());
  options.output = output.get();
  options.log_sum_exp = static_cast<float*>(sums.get());
  const polykv_cuda_queue queue = default_queue();
  uint64_t workspace_bytes = 0;
  REQUIRE(polykv_cuda_attend_workspace_bytes(lease.get(), kLayer, &options, &queue,
                                             &workspace_bytes) == POLYKV_OK);
  const DeviceBuffer workspace(bench, workspace_bytes);
  CHECK(polykv_cuda_layer_attend(lease.get(), kLayer, &options, &queue, workspace.get(),
                                 workspace_bytes - 1) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(std::string(polykv_last_error()).find("workspace") != std::string::npos);
  const polykv_status status = polykv_cuda_layer_attend(lease.get(), kLayer, &options, &queue,
                                                        workspace.get(), workspace_bytes);
  INFO(polykv_last_error());
  REQUIRE(status == POLYKV_OK);
  CHECK(difference(copy_back(output, want.size()), want) < 2e-3);
  CHECK(difference(copy_back(sums, want_sums.size()), want_sums) < 1e-3);
}

}  // namespace

TEST_CASE(
    "kernels read a document in device memory as the CPU does, over segments and parts of them") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  for (const polykv_profile profile :
       {POLYKV_PROFILE_K5V4, POLYKV_PROFILE_EXACT, POLYKV_PROFILE_PAPER_K8V3}) {
    INFO(polykv_profile_name(profile));
    SyntheticDocument document(500, static_cast<uint32_t>(profile));
    document.profile = profile;
    const bool is_one_segment = profile == POLYKV_PROFILE_PAPER_K8V3;
    const client::Lease lease =
        document.publish(session, polykv_profile_name(profile), is_one_segment ? 500 : 300);
    REQUIRE(lease.info().segment_count == (is_one_segment ? 1 : 2));
    compare_decoding(bench, lease, 0, 500);
    compare_decoding(bench, lease, 250, 101);
    compare_attention(bench, lease, 0, 500);
    compare_attention(bench, lease, 290, 30);
  }
}

TEST_CASE("kernels read a document in host memory once it was staged") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags({}, "memfd"));
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(400);
  document.profile = POLYKV_PROFILE_K5V4;
  client::Lease lease = document.publish(session, "a", 300);
  polykv_decode_options options;
  polykv_decode_options_init(&options);
  options.token_count = 1;
  options.dtype = POLYKV_F16;
  const polykv_cuda_queue queue = default_queue();
  CHECK(polykv_cuda_layer_decode(lease.get(), 0, &options, &queue) == POLYKV_ERR_UNSUPPORTED);
  CHECK(std::string(polykv_last_error()).find("polykv_cuda_lease_stage") != std::string::npos);
  uint64_t bytes = 0;
  REQUIRE(polykv_cuda_lease_staging_bytes(lease.get(), &bytes) == POLYKV_OK);
  const DeviceBuffer copy(bench, bytes);
  REQUIRE(polykv_cuda_lease_stage(lease.get(), 0, copy.get(), bytes) == POLYKV_OK);
  compare_decoding(bench, lease, 0, 400);
  compare_attention(bench, lease, 10, 380);
}

namespace {

client::Segment begin_on_host(client::Publisher& publisher, uint64_t token_count) {
  auto segment = publisher.begin_segment(token_count);
  REQUIRE_OK(segment);
  return std::move(*segment);
}

/// Encodes all layers of a segment from device memory.
void encode_by_kernels(const CudaBench& bench, const SyntheticDocument& document,
                       polykv_segment* segment, uint64_t first, uint64_t count, int device,
                       void* stream = nullptr) {
  device::Runtime& runtime = runtime_here();
  polykv_cuda_queue queue = default_queue();
  queue.device = device;
  queue.stream = stream;
  for (uint32_t layer = 0; layer < document.layers.size(); ++layer) {
    const std::vector<float> k = document.values(false, layer, first, count);
    const std::vector<float> v = document.values(true, layer, first, count);
    const DeviceBuffer device_k(bench, k.size() * sizeof(float));
    const DeviceBuffer device_v(bench, v.size() * sizeof(float));
    REQUIRE_OK(runtime.copy_to_device(device_k.get(), k.data(), k.size() * sizeof(float)));
    REQUIRE_OK(runtime.copy_to_device(device_v.get(), v.data(), v.size() * sizeof(float)));
    polykv_kv_source source;
    polykv_kv_source_init(&source);
    source.dtype = POLYKV_F32;
    source.k = device_k.get();
    source.v = device_v.get();
    uint64_t bytes = 0;
    REQUIRE(polykv_cuda_encode_workspace_bytes(segment, layer, &bytes) == POLYKV_OK);
    const DeviceBuffer workspace(bench, bytes);
    CHECK(polykv_cuda_segment_encode_layer(segment, layer, &source, &queue, workspace.get(),
                                           bytes - 1) == POLYKV_ERR_INVALID_ARGUMENT);
    keep_busy(stream, workspace.get());
    const polykv_status status =
        polykv_cuda_segment_encode_layer(segment, layer, &source, &queue, workspace.get(), bytes);
    INFO(polykv_last_error());
    REQUIRE(status == POLYKV_OK);
  }
}

}  // namespace

TEST_CASE(
    "a producer encodes on the GPU, for device memory and for host memory, and polykvd verifies "
    "it") {
  const CudaBench bench;
  const std::string backing = GENERATE("cuda", "memfd");
  const DaemonProcess daemon(bench.device().flags({}, backing));
  client::Session session = connect_to(daemon.socket_path());
  for (const polykv_profile profile : {POLYKV_PROFILE_EXACT, POLYKV_PROFILE_K5V4}) {
    INFO(polykv_profile_name(profile) << " in " << backing);
    SyntheticDocument document(150, static_cast<uint32_t>(profile));
    document.profile = profile;
    client::Publisher publisher = document.become_producer(session, nullptr);
    for (const uint64_t first : {0, 100}) {
      const uint64_t count = first == 0 ? 100 : 50;
      client::Segment segment =
          backing == "cuda" ? begin_on_gpu(publisher, count) : begin_on_host(publisher, count);
      encode_by_kernels(bench, document, segment.get(), first, count, backing == "cuda" ? -1 : 0);
      const auto committed = segment.commit();
      INFO(polykv_last_error());
      REQUIRE_OK(committed);
    }
    const auto lease = publisher.finish_with_lease();
    REQUIRE_OK(lease);
    CHECK_OK(lease->verify());
    // As good as what the CPU encodes of the same values.
    SyntheticDocument twin(150, 1000 + static_cast<uint32_t>(profile));
    twin.profile = profile;
    const client::Lease by_cpu = twin.publish(session, nullptr, 100);
    const double error = document.worst_error(*lease);
    CHECK(error <= 1.001 * twin.worst_error(by_cpu));
    CHECK((error == 0) == (profile == POLYKV_PROFILE_EXACT));
  }
}

TEST_CASE(
    "row 35: a client whose own device memory cannot be exported publishes and reads as any") {
  const CudaBench bench;
  const std::string backing = GENERATE("cuda", "memfd");
  const DaemonProcess daemon(bench.device().flags({}, backing));
  const OwnFaults expandable_segments("private_memory");
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(130);
  document.profile = POLYKV_PROFILE_K5V4;
  client::Publisher publisher = document.become_producer(session, "a");
  for (const uint64_t first : {0, 100}) {
    const uint64_t count = first == 0 ? 100 : 30;
    client::Segment segment =
        backing == "cuda" ? begin_on_gpu(publisher, count) : begin_on_host(publisher, count);
    encode_by_kernels(bench, document, segment.get(), first, count, backing == "cuda" ? -1 : 0);
    REQUIRE_OK(segment.commit());
  }
  const auto lease = publisher.finish_with_lease();
  REQUIRE_OK(lease);
  CHECK_OK(lease->verify());
  uint64_t staging_bytes = 0;
  if (backing == "memfd")
    REQUIRE(polykv_cuda_lease_staging_bytes(lease->get(), &staging_bytes) == POLYKV_OK);
  const DeviceBuffer own(bench, std::max<uint64_t>(staging_bytes, 1));
  if (backing == "memfd")
    REQUIRE(polykv_cuda_lease_stage(lease->get(), 0, own.get(), staging_bytes) == POLYKV_OK);
  compare_decoding(bench, *lease, 0, 130);
  compare_attention(bench, *lease, 20, 110);
  // It never tried to export anything, and could not have.
  CHECK(bench.device().state()->refused_export_total == 0);
  CHECK(runtime_here().export_handle(own.get()).status().code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(bench.device().state()->refused_export_total == 1);
}

TEST_CASE("row 37: what was queued on a stream is done before and after a layer is encoded on it") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags({}, "memfd"));
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(70);
  document.profile = POLYKV_PROFILE_K5V4;
  client::Publisher publisher = document.become_producer(session, "a");
  client::Segment segment = begin_on_host(publisher, 70);
  device::Runtime& runtime = runtime_here();
  REQUIRE_OK(runtime.use_device(0));
  const auto stream = runtime.create_stream();
  REQUIRE_OK(stream);
  // The workspace, which the payload is made in, is what the stream is busy with: at first by the caller's work.
  encode_by_kernels(bench, document, segment.get(), 0, 70, 0, *stream);
  REQUIRE_OK(segment.commit());
  const auto lease = publisher.finish_with_lease();
  REQUIRE_OK(lease);
  CHECK_OK(lease->verify());
  CHECK_OK(runtime.destroy_stream(*stream));
  // ~CudaBench: nothing was touched while the stream was busy with it.
}

TEST_CASE(
    "what a producer on the GPU may not do is refused, and the segment can still be encoded") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(70);
  document.profile = POLYKV_PROFILE_K5V4;
  client::Publisher publisher = document.become_producer(session, "a");
  client::Segment segment = begin_on_gpu(publisher, 70);
  std::vector<float> k = document.values(false, 0, 0, 70);
  k[65 * 2 * 64] = NAN;
  const std::vector<float> v = document.values(true, 0, 0, 70);
  const DeviceBuffer device_k(bench, k.size() * sizeof(float));
  const DeviceBuffer device_v(bench, v.size() * sizeof(float));
  device::Runtime& runtime = runtime_here();
  REQUIRE_OK(runtime.copy_to_device(device_k.get(), k.data(), k.size() * sizeof(float)));
  REQUIRE_OK(runtime.copy_to_device(device_v.get(), v.data(), v.size() * sizeof(float)));
  polykv_kv_source source;
  polykv_kv_source_init(&source);
  source.dtype = POLYKV_F32;
  source.k = device_k.get();
  source.v = device_v.get();
  uint64_t bytes = 0;
  CHECK(polykv_cuda_encode_workspace_bytes(segment.get(), 9, &bytes) ==
        POLYKV_ERR_INVALID_ARGUMENT);
  REQUIRE(polykv_cuda_encode_workspace_bytes(segment.get(), 0, &bytes) == POLYKV_OK);
  const DeviceBuffer workspace(bench, bytes);
  polykv_cuda_queue queue = default_queue();
  const auto encode = [&] {
    return polykv_cuda_segment_encode_layer(segment.get(), 0, &source, &queue, workspace.get(),
                                            bytes);
  };
  CHECK(encode() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(std::string(polykv_last_error()).find("token 65") != std::string::npos);
  queue.device = 1;
  CHECK(encode() == POLYKV_ERR_WRONG_DEVICE);
  queue.device = -1;
  source.k = static_cast<uint8_t*>(device_k.get()) + 1;
  CHECK(encode() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(std::string(polykv_last_error()).find("K is not aligned") != std::string::npos);
  source.k = nullptr;
  CHECK(encode() == POLYKV_ERR_INVALID_ARGUMENT);
  encode_by_kernels(bench, document, segment.get(), 0, 70, -1);
  REQUIRE_OK(segment.commit());
  CHECK_OK(publisher.finish());
}

TEST_CASE("what cannot be read on the GPU is refused as on the CPU, and nothing is written") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(100);
  document.profile = POLYKV_PROFILE_K5V4;
  const client::Lease lease = document.publish(session, "a");
  polykv_cuda_queue queue = default_queue();
  polykv_decode_options decode;
  polykv_decode_options_init(&decode);
  decode.token_count = 101;
  decode.dtype = POLYKV_F16;
  CHECK(polykv_cuda_layer_decode(lease.get(), 0, &decode, &queue) == POLYKV_ERR_INVALID_ARGUMENT);
  decode.token_count = 100;
  CHECK(polykv_cuda_layer_decode(lease.get(), 99, &decode, &queue) == POLYKV_ERR_INVALID_ARGUMENT);
  decode.dtype = static_cast<polykv_dtype>(9);
  CHECK(polykv_cuda_layer_decode(lease.get(), 0, &decode, &queue) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(polykv_cuda_layer_decode(lease.get(), 0, &decode, nullptr) == POLYKV_ERR_INVALID_ARGUMENT);
  decode.dtype = POLYKV_F16;
  decode.k = reinterpret_cast<void*>(uintptr_t{4097});
  CHECK(polykv_cuda_layer_decode(lease.get(), 0, &decode, &queue) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(std::string(polykv_last_error()).find("K is not aligned") != std::string::npos);
  decode.k = nullptr;
  queue.device = 7;
  CHECK(polykv_cuda_layer_decode(lease.get(), 0, &decode, &queue) == POLYKV_ERR_WRONG_DEVICE);
  queue.device = -1;
  polykv_attend_options attend;
  polykv_attend_options_init(&attend);
  attend.token_count = 100;
  attend.head_count = lease.info().model->layers[0].kv_head_count + 1;
  float value = 42;
  attend.q = &value;
  attend.output = &value;
  CHECK(polykv_cuda_layer_attend(lease.get(), 0, &attend, &queue, nullptr, 0) ==
        POLYKV_ERR_INVALID_ARGUMENT);
  attend.head_count = lease.info().model->layers[0].kv_head_count;
  CHECK(polykv_cuda_layer_attend(lease.get(), 0, &attend, &queue, nullptr, 0) ==
        POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(value == 42);
}
