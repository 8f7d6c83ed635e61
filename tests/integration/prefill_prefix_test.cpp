// Prefixes and extensions with the real polykv-prefill, on a tiny model with random weights, and on
// SmolLM2 where it is there.
#include <signal.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <thread>
#include <vector>

#include "common/digest.h"
#include "daemon/prefill/model/model.h"
#include "daemon/prefill/transformer/transformer.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/ingest_bench.h"
#include "tests/support/model.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

using Flags = std::vector<std::string>;

struct ModelFolder {
  explicit ModelFolder(const std::string& bytes) : path(folder.write("model.gguf", bytes)) {}
  TemporaryFolder folder;
  std::string path;
};

std::string tiny_model(uint32_t seed = 1) {
  GgufBuilder model = tiny_llama(seed);
  model.set_u32("llama.context_length", 32768);
  return model.build();
}

/// Where documents are in the memory of a GPU, a worker that computes on it: one on the processor cannot read a prefix there.
const char* worker() {
#ifdef POLYKV_PREFILL_ON_EMULATED_GPU
  if (TestDevice::is_wanted()) return POLYKV_PREFILL_ON_EMULATED_GPU;
#endif
  return POLYKV_PREFILL_PATH;
}

struct Bench : private ModelFolder, public IngestBench {
  explicit Bench(Flags flags = {})
      : ModelFolder(tiny_model()), IngestBench(worker(), path, std::move(flags)) {}
};

/// No merges: a token for each character. Texts of different numbers differ from `shared` on.
std::string text_of(size_t token_count, size_t shared = SIZE_MAX, int number = 0) {
  std::string text(token_count, ' ');
  for (size_t i = 0; i < token_count; ++i) {
    const size_t salt = i < shared ? 0 : static_cast<size_t>(number);
    text[i] = static_cast<char>('A' + (i * 7 + salt) % 26);
  }
  return text;
}

uint64_t prefilled(const IngestBench& bench) {
  return bench.status().tokens_prefilled_total;
}

/// The largest relative difference of K or V in any layer between a document and what one prefill of
/// all its tokens gives.
double difference_from_one_prefill(const IngestBench& bench, const lib::Lease& lease) {
  const uint64_t count = lease.document().token_count;
  std::vector<uint32_t> ids(count);
  REQUIRE_OK(lease.copy_tokens(0, count, ids.data()));
  const UniqueFd file = bench.open_model();
  const Model model = must(Model::open(file.get(), "model"));
  set_thread_count(2);
  Transformer transformer(std::make_shared<const Weights>(must(Weights::load(model, 2))));
  KvCache cache = must(KvCache::create(model.config(), static_cast<uint32_t>(count)));
  REQUIRE_OK(transformer.forward(ids, cache, {}));
  const uint32_t dim = cache.head_dim();
  const size_t head_floats = count * dim;
  std::vector<float> k(head_floats * cache.kv_head_count());
  std::vector<float> v(k.size());
  lib::DecodeRequest decode;
  decode.token_count = count;
  decode.k = k.data();
  decode.v = v.data();
  decode.k_strides = decode.v_strides = {static_cast<int64_t>(head_floats), dim, 1};
  double worst = 0;
  for (uint32_t layer = 0; layer < cache.layer_count(); ++layer) {
    REQUIRE_OK(lease.decode(layer, decode));
    for (const auto& [got, whole] :
         {std::pair(&k, cache.k(layer)), std::pair(&v, cache.v(layer))}) {
      double difference = 0;
      double norm = 0;
      for (size_t i = 0; i < got->size(); ++i) {
        const double expected = whole[i / head_floats * cache.head_stride() + i % head_floats];
        difference += ((*got)[i] - expected) * ((*got)[i] - expected);
        norm += expected * expected;
      }
      worst = std::max(worst, std::sqrt(difference / norm));
    }
  }
  return worst;
}

lib::IngestRequest exact(const std::string& name = "") {
  lib::IngestRequest request;
  request.profile = Profile::exact;
  request.name = name;
  return request;
}

lib::IngestRequest extending(const std::string& name, Profile profile = Profile::any) {
  lib::IngestRequest request;
  request.extend_name = name;
  request.profile = profile;
  return request;
}

std::string message_of(const IngestResult& result) {
  return result.status().message();
}

}  // namespace

TEST_CASE("a text that begins like another is computed from there on, and exactly the same") {
  const Bench bench;
  REQUIRE_OK(bench.ingest(exact(), text_of(5000)));
  CHECK(prefilled(bench) == 5000);
  const IngestResult second = bench.ingest(exact(), text_of(5200, 4500, 1));
  REQUIRE(message_of(second) == "");
  CHECK(prefilled(bench) == 5000 + 5200 - 4352);
  CHECK((*second)->document().prefix_treatment == PrefixTreatment::decoded);
  CHECK((*second)->document().shared_bytes > 0);
  CHECK(difference_from_one_prefill(bench, **second) <= 1e-4);
  CHECK_OK((*second)->verify());
  // A beginning of it is there already.
  REQUIRE_OK(bench.ingest(exact("begin"), text_of(4400)));
  CHECK(prefilled(bench) == 5000 + 5200 - 4352);
}

TEST_CASE("what attends to a decoded prefix differs from what attends to a recomputed one") {
  const bool recompute = GENERATE(false, true);
  const Bench bench;
  REQUIRE_OK(bench.ingest(text_of(3000)));
  lib::IngestRequest request;
  request.recompute_prefix = recompute;
  const IngestResult second = bench.ingest(request, text_of(3000, 2600, 1));
  REQUIRE(message_of(second) == "");
  CHECK(prefilled(bench) == 3000 + (recompute ? 3000 : 3000 - 2560));
  CHECK((*second)->document().prefix_treatment ==
        (recompute ? PrefixTreatment::recomputed : PrefixTreatment::decoded));
  CHECK((*second)->document().segment_count == 2);
  CHECK(difference_from_one_prefill(bench, **second) < 0.1);
}

TEST_CASE("simultaneous ingests of two texts that share a prefix prefill exactly the union") {
  const Bench bench;
  std::vector<std::thread> agents;
  std::vector<Status> results(8);
  for (size_t i = 0; i < results.size(); ++i) {
    agents.emplace_back([&, i] {
      results[i] = bench.ingest(exact(), i < 6 ? text_of(7639) : text_of(6000, 5000, 1)).status();
    });
  }
  for (std::thread& agent : agents) agent.join();
  for (const Status& result : results) CHECK(result.message() == "");
  CHECK(prefilled(bench) == 7639 + 6000 - 4864);
}

TEST_CASE("a document is extended without its worker, its readers or its segments noticing") {
  const Bench bench({"--worker-idle", "20ms"});
  const IngestResult first = bench.ingest(exact("log"), text_of(3000));
  REQUIRE(message_of(first) == "");
  uint64_t expected = 3000;
  uint64_t stored = bench.status().stored_bytes;
  IngestResult longest = Status(POLYKV_ERR_INTERNAL, "not run");
  for (int i = 0; i < 2; ++i) {
    bench.wait_until_no_worker();
    longest = bench.ingest(extending("log"), text_of(100, 0, i + 1));
    REQUIRE(message_of(longest) == "");
    expected += 100;
    CHECK(prefilled(bench) == expected);
    CHECK((*longest)->document().token_count == expected);
    CHECK((*longest)->document().names == std::vector<std::string>{"log"});
    const uint64_t now = bench.status().stored_bytes;
    // Of about 1.6 MB, or a page of the GPU's.
    CHECK(now - stored <= (TestDevice::is_wanted() ? device::kGranularityBytes : 200'000));
    stored = now;
  }
  CHECK((*longest)->document().segment_count == 3);
  CHECK(difference_from_one_prefill(bench, **longest) <= 1e-4);
  CHECK_OK((*first)->verify());
  CHECK((*first)->document().token_count == 3000);
  CHECK(difference_from_one_prefill(bench, **first) <= 1e-4);
  // The longer text's own tokens find it.
  std::vector<uint32_t> ids(expected);
  REQUIRE_OK((*longest)->copy_tokens(0, expected, ids.data()));
  lib::AcquireRequest by_tokens;
  by_tokens.model = &(*longest)->document().identity;
  by_tokens.tokens = ids;
  CHECK_OK(lib::acquire(bench.connect(), by_tokens));
}

TEST_CASE("of two extensions at the same time one is told that the name has moved") {
  const Bench bench;
  REQUIRE_OK(bench.ingest(exact("log"), text_of(3000)));
  std::vector<Status> results(2);
  std::vector<std::thread> agents;
  for (int i = 0; i < 2; ++i) {
    agents.emplace_back([&, i] {
      results[static_cast<size_t>(i)] =
          bench.ingest(extending("log"), text_of(100, 0, i + 1)).status();
    });
  }
  for (std::thread& agent : agents) agent.join();
  // Both began from the same document, or the second came after the first was done.
  const size_t refused = static_cast<size_t>(
      std::count_if(results.begin(), results.end(), [](const Status& s) { return !s.is_ok(); }));
  for (const Status& result : results) {
    if (result.is_ok()) continue;
    CHECK(result.code() == POLYKV_ERR_BUSY);
    CHECK(contains(result.message(), "extend it again"));
  }
  lib::AcquireRequest by_name;
  by_name.name = "log";
  const auto log = lib::acquire(bench.connect(), by_name);
  REQUIRE_OK(log);
  CHECK(log->lease->document().token_count == 3000 + 100 * (2 - refused));
  CHECK(bench.status().lease_count <= 1);
}

TEST_CASE("a worker that was killed after a segment costs only the rest") {
  const Bench bench;
  lib::IngestRequest request = exact();
  request.on_progress = [&, sent = false](const polykv_ingest_progress& progress) mutable {
    if (sent || progress.tokens_done < 4096 + 512) return true;
    sent = true;
    const std::string children = "/proc/" + std::to_string(bench.polykvd().pid()) + "/task/" +
                                 std::to_string(bench.polykvd().pid()) + "/children";
    pid_t worker = 0;
    std::ifstream(children) >> worker;
    REQUIRE(worker > 0);
    ::kill(worker, SIGKILL);
    return true;
  };
  CHECK(bench.ingest(request, text_of(12'000)).status().code() == POLYKV_ERR_WORKER);
  const uint64_t before = prefilled(bench);
  CHECK(before >= 4096);
  REQUIRE_OK(bench.ingest(exact(), text_of(12'000)));
  const uint64_t rest = prefilled(bench) - before;
  CHECK(rest <= 12'000 - 4096);
  CHECK(rest % 4096 == 12'000 % 4096);
}

TEST_CASE("what cannot be extended is refused, and says why") {
  const Bench bench;
  REQUIRE_OK(bench.ingest(exact("exact"), text_of(300)));
  lib::IngestRequest paper;
  paper.name = "paper";
  paper.profile = Profile::paper_k8v3;
  REQUIRE_OK(bench.ingest(paper, text_of(300)));
  const auto refused = [&](lib::IngestRequest request, const std::string& text, polykv_status code,
                           const std::string& with) {
    const IngestResult result = bench.ingest(std::move(request), text);
    INFO(message_of(result));
    CHECK(result.status().code() == code);
    CHECK(contains(message_of(result), with));
  };
  refused(extending("nothing"), "text", POLYKV_ERR_NOT_FOUND, "polykvctl ls");
  refused(extending("exact", Profile::k8v8), "text", POLYKV_ERR_NOT_FOUND, "codec profile");
  refused(extending("paper"), "text", POLYKV_ERR_UNSUPPORTED, "paper-k8v3");
  refused(extending("exact"), "", POLYKV_ERR_EMPTY_DOCUMENT, "no tokens");
  lib::IngestRequest with_bos = extending("exact");
  with_bos.add_bos = true;
  refused(with_bos, "text", POLYKV_ERR_INVALID_ARGUMENT, "in front");
  refused(extending("exact"), text_of(40'000), POLYKV_ERR_CONTEXT_EXCEEDED, "40300 tokens");
  const TemporaryFolder folder;
  const UniqueFd other(
      ::open(folder.write("other.gguf", tiny_model(2)).c_str(), O_RDONLY | O_CLOEXEC));
  const UniqueFd text = text_file("text");
  lib::IngestRequest other_model = extending("exact");
  other_model.model_fd = other.get();
  other_model.text_fd = text.get();
  const auto wrong_model = lib::ingest(bench.connect(), other_model);
  CHECK(wrong_model.status().code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(contains(wrong_model.status().message(), "another model"));
}

TEST_CASE("GPL-3 by SmolLM2, extended four times, is what one prefill of the whole gives") {
  const char* model = std::getenv("POLYKV_TEST_MODEL");
  if (model == nullptr) {
    WARN("skipped: POLYKV_TEST_MODEL is not set");
    return;
  }
  const IngestBench bench(POLYKV_PREFILL_PATH, model, {"--worker-idle", "20ms"});
  const std::string text = read_file(kGpl3Path);
  const IngestResult first = bench.ingest(exact("gpl"), text);
  REQUIRE(message_of(first) == "");
  REQUIRE((*first)->document().token_count == 7639);
  IngestResult longest = Status(POLYKV_ERR_INTERNAL, "not run");
  std::vector<uint32_t> hundred(100);
  REQUIRE_OK((*first)->copy_tokens(1000, 100, hundred.data()));
  for (int i = 1; i <= 4; ++i) {
    bench.wait_until_no_worker();
    lib::IngestRequest request = extending("gpl");
    const UniqueFd file = bench.open_model();
    request.model_fd = file.get();
    request.tokens = hundred;
    longest = lib::ingest(bench.connect(), request);
    REQUIRE(message_of(longest) == "");
    CHECK(prefilled(bench) == 7639U + 100U * static_cast<unsigned>(i));
  }
  CHECK((*longest)->document().token_count == 8039);
  CHECK_OK((*first)->verify());
  CHECK(difference_from_one_prefill(bench, **longest) <= 1e-4);
}
