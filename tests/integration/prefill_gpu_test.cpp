// polykvd with a worker that computes on a GPU: an emulated one, whose memory the tensors are in and whose kernels encode
// from there. What its documents decode to is compared with those of the real worker on the processor. The same program is
// built for this machine's GPU, with the real worker in its sandbox; where that has none it exits with 77.
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "kernels/certificate.h"
#include "tests/support/cuda_bench.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/gpu_sharing.h"
#include "tests/support/ingest_bench.h"
#include "tests/support/relative_error.h"
#include "tests/support/require_ok.h"
#include "tests/support/run_program.h"

using namespace polykv;
using namespace polykv::test;

namespace {

/// A program that was taken to another machine finds others elsewhere than where they were built.
std::string path_or(const char* name, const char* built) {
  const char* elsewhere = std::getenv(name);
  return elsewhere == nullptr ? built : elsewhere;
}
std::string real_worker() {
  return path_or("POLYKV_TEST_PREFILL", POLYKV_PREFILL_PATH);
}

std::string write_model(uint32_t head_dim) {
  static const TemporaryFolder folder;
  GgufBuilder model = tiny_llama();
  model.set_u32("llama.context_length", 32768);
  model.set_u32("llama.attention.head_count", 64 / head_dim);
  model.set_u32("llama.attention.head_count_kv", 32 / head_dim);
  model.set_u32("llama.rope.dimension_count", head_dim);
  return folder.write("model" + std::to_string(head_dim) + ".gguf", model.build());
}
std::string model_file() {
  static const std::string path = write_model(16);
  return path;
}

/// The worker on the processor, and documents in host memory.
const IngestBench& host_bench() {
  static const IngestBench bench(real_worker(), model_file(), {"--worker-device", "cpu"});
  return bench;
}

#ifdef POLYKV_ON_EMULATION

struct GpuBench : private CudaBench, public IngestBench {
  explicit GpuBench(const std::string& backing, const std::string& choice = "cuda",
                    const std::string& worker = POLYKV_PREFILL_ON_EMULATED_GPU,
                    const std::string& model = model_file())
      : IngestBench(worker, model, EmulatedDevice::flags({"--worker-device", choice}, backing)) {}
  using CudaBench::device;
  uint64_t open_total() const { return device().state()->open_total; }
};

bool can_keep_documents_on_gpu() {
  return true;
}

#else

std::string library_path() {
  return path_or("POLYKV_TEST_CUDA_LIBRARY", POLYKV_CUDA_LIBRARY_PATH);
}

/// What the worker itself finds, in a process of its own.
const bool kHasGpu = [] {
  ::setenv("POLYKV_CUDA_LIBRARY", library_path().c_str(), 1);
  const ProgramRun run = run_program(real_worker(), {"--self-check"});
  if (contains(run.output, "\"uses_gpu\": true")) return true;
  const size_t why = run.output.find("\"computes_on\"");
  std::printf("unavailable: %s%s\n",
              why == run.output.npos
                  ? "polykv-prefill --self-check does not run: "
                  : run.output.substr(why, run.output.find('\n', why) - why).c_str(),
              run.errors.c_str());
  std::fflush(stdout);
  std::_Exit(std::getenv("POLYKV_TEST_NEEDS_GPU") != nullptr ? 1 : 77);
}();

/// Documents in device memory, which not every machine with a GPU shares among processes.
bool can_keep_documents_on_gpu() {
  static const std::string problem = why_memory_is_not_shared(library_path());
  static const bool said =
      problem.empty() ||
      std::printf("left out: documents in device memory: %s\n", problem.c_str()) > 0;
  return said && problem.empty();
}

struct GpuBench : public IngestBench {
  explicit GpuBench(const std::string& backing)
      : IngestBench(real_worker(), model_file(),
                    {"--worker-device", "cuda", "--backing", backing, "--budget", "256MiB",
                     "--cuda-library", library_path(), "--cuda-reserve", "0"}) {}
};

#endif

/// No two tokens in a row are alike, and nothing merges.
std::string text_of(size_t token_count, char first = 'A') {
  std::string text(token_count, ' ');
  for (size_t i = 0; i < token_count; ++i) text[i] = static_cast<char>(first + i * 7 % 26);
  return text;
}

std::string message_of(const IngestResult& result) {
  return result.status().message();
}

/// All of a layer, K then V.
std::vector<float> decoded(const lib::Lease& lease, uint32_t layer) {
  const lib::DocumentRecord& document = lease.document();
  const LayerGeometry& geometry = document.identity.layers[layer];
  const size_t half = document.token_count * geometry.kv_head_count * geometry.k_head_dim;
  std::vector<float> values(2 * half);
  lib::DecodeRequest request;
  request.token_count = document.token_count;
  request.k = values.data();
  request.v = values.data() + half;
  REQUIRE_OK(lease.decode(layer, request));
  return values;
}

/// Norm of the difference / norm of what the processor's document decodes to; the worst layer.
double difference(const lib::Lease& ours, const lib::Lease& expected) {
  REQUIRE(ours.document().token_count == expected.document().token_count);
  double worst = 0;
  for (uint32_t layer = 0; layer < ours.layer_count(); ++layer) {
    const std::vector<float> a = decoded(ours, layer);
    const std::vector<float> b = decoded(expected, layer);
    const double off = relative_error(a, b);
    worst = off <= worst ? worst : off;  // NaN is worst
  }
  return worst;
}

// Both workers' K and V differ by rounding, 1.4e-7, which is all that there is in `exact`. Where a value lies between two
// levels it may take the other one. Measured is 1.3e-5; one such value among the 90,000 of a layer makes 3e-4.
double tolerance(Profile profile) {
#ifdef POLYKV_ON_EMULATION
  return profile == Profile::exact ? 1e-6 : 2e-3;
#else
  return profile == Profile::exact ? 1e-5 : 2e-3;  // cuBLAS has sums of its own
#endif
}

void compare(const lib::Lease& ours, const lib::Lease& expected) {
  CHECK_OK(ours.verify());
  CHECK(ours.document().digest == expected.document().digest);
  CHECK(ours.document().segment_count == expected.document().segment_count);
  const double off = difference(ours, expected);
  std::printf("%s, %llu tokens: %.1e\n", profile_name(ours.document().profile),
              static_cast<unsigned long long>(ours.document().token_count), off);
  CHECK(off <= tolerance(ours.document().profile));
  for (uint32_t layer = 0; layer < ours.layer_count(); ++layer) {
    const lib::LayerQuality& quality = ours.document().layers[layer];
    const lib::LayerQuality& wanted = expected.document().layers[layer];
    CHECK(quality.query_count == wanted.query_count);
    CHECK(quality.profiles == wanted.profiles);
    CHECK(quality.relative_error == Approx(wanted.relative_error).epsilon(1e-3).margin(1e-6));
  }
}

}  // namespace

TEST_CASE("what a worker on a GPU publishes decodes to what one on the processor publishes") {
  // In host memory: the tests of prefixes.
  const GpuBench bench(can_keep_documents_on_gpu() ? "cuda" : "memfd");
  for (const Profile profile :
       {Profile::exact, Profile::k5v4, Profile::automatic, Profile::paper_k8v3}) {
    INFO(profile_name(profile));
    lib::IngestRequest request;
    request.profile = profile;
#ifdef POLYKV_ON_EMULATION
    const uint64_t opened = bench.open_total();
#endif
    const IngestResult ours = bench.ingest(request, text_of(700));
    REQUIRE(message_of(ours) == "");
    CHECK((*ours)->document().layers[0].query_count == kCertificateQueries);
#ifdef POLYKV_ON_EMULATION
    // The worker had the segment's own memory open, and polykvd copied nothing.
    CHECK(bench.open_total() == opened + 1);
#endif
    const IngestResult expected = host_bench().ingest(request, text_of(700));
    REQUIRE(message_of(expected) == "");
    compare(**ours, **expected);
  }
}

TEST_CASE("a long document is published from a GPU segment by segment") {
  const GpuBench bench(can_keep_documents_on_gpu() ? "cuda" : "memfd");
  lib::IngestRequest request;
  request.profile = Profile::exact;
  const IngestResult ours = bench.ingest(request, text_of(4100));
  REQUIRE(message_of(ours) == "");
  CHECK((*ours)->document().segment_count == 2);
  compare(**ours, *must(host_bench().ingest(request, text_of(4100))));
}

TEST_CASE("a worker on a GPU goes on behind what is sealed, wherever documents are") {
  const std::string backing = GENERATE("cuda", "memfd");
  if (backing == "cuda" && !can_keep_documents_on_gpu()) return;
  const GpuBench bench(backing);
  lib::IngestRequest request;
  request.profile = Profile::k5v4;
  // Begins like no other test's, nor the other backing's: the worker on the processor shares its documents as well.
  const std::string shorter = backing + text_of(512 - backing.size(), 'D');
  const std::string longer = shorter + text_of(100, 'B');
  REQUIRE(message_of(bench.ingest(request, shorter)) == "");
  REQUIRE(message_of(host_bench().ingest(request, shorter)) == "");
  const IngestResult ours = bench.ingest(request, longer);
  REQUIRE(message_of(ours) == "");
  CHECK(bench.status().tokens_prefilled_total == 512 + 100);
  CHECK((*ours)->document().segment_count == 2);
  CHECK((*ours)->prefix_treatment() == PrefixTreatment::decoded);
  compare(**ours, *must(host_bench().ingest(request, longer)));

  request.recompute_prefix = true;
  const std::string another = shorter + text_of(60, 'C');
  const IngestResult recomputed = bench.ingest(request, another);
  REQUIRE(message_of(recomputed) == "");
  CHECK((*recomputed)->prefix_treatment() == PrefixTreatment::recomputed);
  compare(**recomputed, *must(host_bench().ingest(request, another)));
}

TEST_CASE("a long prefix in host memory reaches the GPU in parts") {
  const GpuBench bench("memfd");
  lib::IngestRequest request;
  request.profile = Profile::exact;
  // What the second part holds is like nothing in the first.
  const std::string longer = text_of(4096, 'F') + std::string(304, 'z') + text_of(100, 'G');
  for (const IngestBench* either : {static_cast<const IngestBench*>(&bench), &host_bench()})
    REQUIRE(message_of(either->ingest(request, longer.substr(0, 4400))) == "");
  const IngestResult ours = bench.ingest(request, longer);
  REQUIRE(message_of(ours) == "");
  CHECK(bench.status().tokens_prefilled_total == 4400 + 4500 - 4400 / 256 * 256);
  compare(**ours, *must(host_bench().ingest(request, longer)));
}

#ifdef POLYKV_ON_EMULATION

TEST_CASE("a layer without a kernel is encoded on the processor, from the GPU's tensors") {
  const std::string model = write_model(8);
  const GpuBench bench("cuda", "cuda", POLYKV_PREFILL_ON_EMULATED_GPU, model);
  const IngestBench host(real_worker(), model, {"--worker-device", "cpu"});
  lib::IngestRequest request;
  request.profile = Profile::paper_k8v3;  // its V has at least 16 dims on a GPU
  const uint64_t opened = bench.open_total();
  const IngestResult ours = bench.ingest(request, text_of(300));
  REQUIRE(message_of(ours) == "");
  CHECK(bench.open_total() == opened);  // polykvd copied it there
  compare(**ours, *must(host.ingest(request, text_of(300))));
}

TEST_CASE(
    "a document that does not fit the GPU is refused before it is computed, and others go on") {
  const GpuBench bench("memfd");
  bench.device().change([](EmulatedState& state) { state.foreign_bytes = uint64_t{1000} << 20; });
  const std::string refused = message_of(bench.ingest(text_of(100)));
  bench.device().change([](EmulatedState& state) { state.foreign_bytes = 0; });
  INFO(refused);
  CHECK(contains(refused, "prefilling 100 tokens on Emulated GPU 0 needs"));
  CHECK(contains(refused, "set worker.device to cpu"));
  CHECK(bench.status().tokens_prefilled_total == 0);
  CHECK(message_of(bench.ingest(text_of(100))) == "");
  CHECK(bench.status().worker_count == 1);  // the same one
  // Measured as enough, and taken by another program before it was allocated.
  bench.device().set_faults("out_of_memory");
  const std::string late = message_of(bench.ingest(text_of(120)));
  bench.device().set_faults("");
  INFO(late);
  CHECK(contains(late, "of device memory for the KV cache"));
  CHECK(message_of(bench.ingest(text_of(120))) == "");
}

TEST_CASE("a worker on the processor computes again what is sealed in device memory") {
  const GpuBench bench("cuda", "cpu", real_worker());
  lib::IngestRequest request;
  request.profile = Profile::exact;
  const std::string longer = text_of(300, 'H') + text_of(100, 'I');
  for (const IngestBench* either : {static_cast<const IngestBench*>(&bench), &host_bench()})
    REQUIRE(message_of(either->ingest(request, longer.substr(0, 300))) == "");
  const IngestResult ours = bench.ingest(request, longer);
  REQUIRE(message_of(ours) == "");
  CHECK(bench.status().tokens_prefilled_total == 300 + 400);
  CHECK((*ours)->document().segment_count == 2);
  CHECK((*ours)->prefix_treatment() == PrefixTreatment::recomputed);
  compare(**ours, *must(host_bench().ingest(request, longer)));
}

TEST_CASE("a worker that lost its GPU says so and goes, and the next one computes") {
  const GpuBench bench("memfd");
  REQUIRE(message_of(bench.ingest(text_of(50))) == "");
  lib::IngestRequest request;
  request.profile = Profile::exact;
  request.on_progress = [&](const polykv_ingest_progress& progress) {
    if (progress.phase == POLYKV_INGEST_PREFILLING) bench.device().set_faults("device_lost");
    return true;
  };
  const IngestResult lost = bench.ingest(request, text_of(2000));
  CHECK(lost.status().code() == POLYKV_ERR_DEVICE_LOST);
  bench.wait_until_no_worker();
  bench.device().set_faults("");
  request.on_progress = {};
  CHECK(message_of(bench.ingest(request, text_of(2000))) == "");
}

TEST_CASE("a GPU that works before the sandbox is closed and not in it is an error, or a reason") {
  const char* const why = "use it inside the sandbox: ";
  const char* const cause = "no CUDA-capable device is detected";
  {
    const GpuBench strict("memfd", "cuda");
    strict.device().set_faults("no_driver_in_sandbox");
    const std::string refused = message_of(strict.ingest(text_of(20)));
    INFO(refused);
    CHECK(contains(refused, "worker.device is cuda"));
    CHECK(contains(refused, why));
    CHECK(contains(refused, cause));
    CHECK(strict.status().tokens_prefilled_total == 0);
  }
  const GpuBench automatic("cuda", "auto");
  automatic.device().set_faults("no_driver_in_sandbox");
  lib::IngestRequest request;
  request.profile = Profile::exact;
  const IngestResult ours = automatic.ingest(request, text_of(200, 'K'));
  REQUIRE(message_of(ours) == "");
  CHECK(contains(automatic.polykvd().log(), std::string("no GPU: ") + why));
  CHECK(contains(automatic.polykvd().log(), cause));
  compare(**ours, *must(host_bench().ingest(request, text_of(200, 'K'))));
}

TEST_CASE("what is configured decides: a GPU that is not there is an error, or a reason") {
  // The real worker: whichever libtorch it is built with, no GPU of the emulation's is known to it.
  const GpuBench strict("memfd", "cuda", real_worker());
  const std::string refused = message_of(strict.ingest(text_of(20)));
  INFO(refused);
  CHECK(contains(refused, "worker.device is cuda"));
  CHECK(contains(refused, "use a GPU"));

  const GpuBench automatic("memfd", "auto", real_worker());
  CHECK(message_of(automatic.ingest(text_of(20))) == "");
  CHECK(contains(automatic.polykvd().log(), "no GPU: use a GPU"));
  // `cpu` does not even look.
  const GpuBench cpu("memfd", "cpu");
  CHECK(contains(message_of(cpu.ingest(text_of(20))), "for tests on an emulated GPU alone"));
}

#endif
