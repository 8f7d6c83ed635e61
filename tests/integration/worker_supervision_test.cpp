// How polykvd starts, watches and ends its workers, with a worker that computes nothing.
#include <fcntl.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <thread>
#include <vector>

#include "tests/support/ingest_bench.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

const std::vector<std::string> kStallSoon = {"--stall-deadline", "500ms"};
const std::vector<std::string> kIdleSoon = {"--worker-idle", "20ms"};

/// The model file's text tells the fake worker what to do.
struct ModelFolder {
  explicit ModelFolder(const std::string& text) : path(folder.write("model", text)) {}
  TemporaryFolder folder;
  std::string path;
};

struct Bench : private ModelFolder, public IngestBench {
  explicit Bench(std::vector<std::string> flags = {}, const std::string& model_text = "a model")
      : ModelFolder(model_text), IngestBench(POLYKV_FAKE_WORKER, path, std::move(flags)) {}
  void change_model(const std::string& text) const { folder.write("model", text); }
};

std::string message_of(const IngestResult& result) {
  return result.status().message();
}

}  // namespace

TEST_CASE("a text is computed by a worker and can be read, in every profile") {
  const Bench bench;
  const std::string text(5000, 'x');  // two segments where segments are allowed
  const Profile profile =
      GENERATE(Profile::exact, Profile::k8v8, Profile::k5v4, Profile::paper_k8v3);
  lib::IngestRequest request;
  request.name = "x";
  request.profile = profile;
  const auto lease = bench.ingest(request, text);
  REQUIRE(message_of(lease) == "");
  const lib::DocumentRecord& document = (*lease)->document();
  CHECK(document.token_count == 5000);
  CHECK(document.profile == profile);
  CHECK(document.names == std::vector<std::string>{"x"});
  CHECK(document.segment_count == (profile == Profile::paper_k8v3 ? 1 : 2));
  CHECK_OK((*lease)->verify());
  std::vector<float> k(2 * 16);
  lib::DecodeRequest decode;
  decode.first_token = 4999;
  decode.token_count = 1;
  decode.k = k.data();
  REQUIRE_OK((*lease)->decode(0, decode));
  CHECK(k[7] == Approx(float{'x'}).epsilon(0.01));
  CHECK(bench.status().tokens_prefilled_total == 5000);
}

TEST_CASE("progress tells the phases in order and the tokens as they grow") {
  const Bench bench;
  std::vector<uint32_t> phases;
  uint64_t tokens_done = 0;
  bool grows = true;
  lib::IngestRequest request;
  request.on_progress = [&](const polykv_ingest_progress& progress) {
    phases.push_back(progress.phase);
    grows = grows && progress.tokens_done >= tokens_done;
    tokens_done = progress.tokens_done;
    return true;
  };
  REQUIRE_OK(bench.ingest(request, std::string(100, 'x')));
  CHECK(grows);
  CHECK(tokens_done == 100);
  REQUIRE(!phases.empty());
  CHECK(phases.back() == POLYKV_INGEST_SEALED);
}

TEST_CASE("a document that is there is not computed again") {
  const Bench bench;
  REQUIRE_OK(bench.ingest("the same"));
  REQUIRE_OK(bench.ingest("the same"));
  CHECK(bench.status().tokens_prefilled_total == 8);
  CHECK(bench.status().document_count == 1);
  CHECK(bench.status().lease_count == 0);  // nor does the worker keep what it found
}

TEST_CASE("eight simultaneous ingests of one text compute it once") {
  const Bench bench;
  std::vector<std::thread> agents;
  std::vector<Status> results(8);
  const std::string text(3000, 'y');
  for (Status& result : results) agents.emplace_back([&] { result = bench.ingest(text).status(); });
  for (std::thread& agent : agents) agent.join();
  for (const Status& result : results) CHECK(result.message() == "");
  CHECK(bench.status().tokens_prefilled_total == 3000);
  CHECK(bench.status().worker_count == 1);
}

TEST_CASE("a worker that is killed fails its caller alone, and the next ingest works") {
  const Bench bench;
  const auto other = bench.connect();
  const auto kept = bench.ingest({}, "kept", other);
  REQUIRE_OK(kept);
  const auto lost = bench.ingest("crash");
  CHECK(lost.status().code() == POLYKV_ERR_WORKER);
  CHECK(contains(message_of(lost), "signal 9"));
  CHECK_OK((*kept)->verify());
  CHECK_OK(lib::list_documents(*other, [](const lib::DocumentRecord&) { return true; }));
  CHECK_OK(bench.ingest({}, "next", other));
}

TEST_CASE("jobs that wait behind one that its worker does not survive go to another worker") {
  const Bench bench(kStallSoon);
  std::vector<std::thread> agents;
  std::vector<Status> results(3, Status(POLYKV_ERR_INTERNAL, "not run"));
  lib::IngestRequest request;
  request.on_progress = [&](const polykv_ingest_progress& progress) {
    if (progress.phase != POLYKV_INGEST_PREFILLING || !agents.empty()) return true;
    for (size_t i = 0; i < results.size(); ++i) {
      agents.emplace_back(
          [&, i] { results[i] = bench.ingest("innocent " + std::to_string(i)).status(); });
    }
    return true;
  };
  CHECK(bench.ingest(request, "stall").status().code() == POLYKV_ERR_PRODUCER_LOST);
  for (std::thread& agent : agents) agent.join();
  for (const Status& result : results) CHECK(result.message() == "");
  CHECK(bench.status().document_count == 3);
}

TEST_CASE("jobs that each end their worker end, with an error each") {
  const Bench bench;
  std::vector<std::thread> agents;
  std::vector<Status> results(4);
  for (Status& result : results)
    agents.emplace_back([&] { result = bench.ingest("crash").status(); });
  for (std::thread& agent : agents) agent.join();
  for (const Status& result : results) CHECK(result.code() == POLYKV_ERR_WORKER);
  bench.wait_until_no_worker();
}

TEST_CASE("a worker that dies before it is ready is an error that says how") {
  const Bench bench({}, "die now");
  const auto lost = bench.ingest("text");
  CHECK(lost.status().code() == POLYKV_ERR_WORKER);
  CHECK(contains(message_of(lost), "exited with status 7"));
  bench.change_model("a good model now");
  CHECK_OK(bench.ingest("text"));
}

TEST_CASE("a model that is no good is an error in the worker's own words") {
  const Bench bench({}, "fail this model has no heads");
  const auto refused = bench.ingest("text");
  CHECK(refused.status().code() == POLYKV_ERR_MODEL_FORMAT);
  CHECK(message_of(refused) == "this model has no heads");
}

TEST_CASE("a worker that is stopped loses its ticket and its process, and the next ingest works") {
  const Bench bench(kStallSoon);
  const auto lost = bench.ingest("stall");
  CHECK(lost.status().code() == POLYKV_ERR_PRODUCER_LOST);
  bench.wait_until_no_worker();
  CHECK_OK(bench.ingest("next"));
  CHECK(bench.status().stored_bytes > 0);
}

TEST_CASE("an idle worker goes, and comes back when it is needed") {
  const Bench bench(kIdleSoon);
  REQUIRE_OK(bench.ingest("first"));
  bench.wait_until_no_worker();
  REQUIRE_OK(bench.ingest("second"));
  CHECK(bench.status().tokens_prefilled_total == 11);
}

TEST_CASE("a worker that has nothing to do but is not idle for long stays") {
  const Bench bench;
  REQUIRE_OK(bench.ingest("first"));
  CHECK(bench.status().worker_count == 1);
}

TEST_CASE("an ingest can be cancelled, and its worker goes on with the next") {
  const Bench bench;
  lib::IngestRequest request;
  request.on_progress = [](const polykv_ingest_progress& progress) {
    return progress.phase != POLYKV_INGEST_PREFILLING;
  };
  CHECK(bench.ingest(request, "wait").status().code() == POLYKV_ERR_CANCELLED);
  CHECK_OK(bench.ingest("next"));
  CHECK(bench.status().worker_count == 1);
}

TEST_CASE("a caller that goes away leaves its worker to others") {
  const Bench bench;
  auto session = bench.connect();
  lib::IngestRequest request;
  request.on_progress = [&](const polykv_ingest_progress& progress) {
    if (progress.phase == POLYKV_INGEST_PREFILLING) session->close();
    return true;
  };
  CHECK_FALSE(bench.ingest(request, "wait", session).is_ok());
  CHECK_OK(bench.ingest("next"));
}

TEST_CASE("what a worker refuses is the caller's error, and the worker stays") {
  const Bench bench;
  CHECK(bench.ingest("refuse").status().code() == POLYKV_ERR_BUDGET);
  CHECK(bench.ingest("").status().code() == POLYKV_ERR_EMPTY_DOCUMENT);
  CHECK(bench.status().worker_count == 1);
}

TEST_CASE("a model is fingerprinted once, and again when its file has changed") {
  const Bench bench(kIdleSoon);
  const auto ingest_and_wait = [&] {
    REQUIRE_OK(bench.ingest("text"));
    bench.wait_until_no_worker();
    return bench.status();
  };
  auto status = ingest_and_wait();
  CHECK(status.fingerprint_cache_misses_total == 1);
  CHECK(status.fingerprint_cache_hits_total == 0);
  status = ingest_and_wait();
  CHECK(status.fingerprint_cache_misses_total == 1);
  CHECK(status.fingerprint_cache_hits_total == 1);
  CHECK(status.document_count == 1);
  bench.change_model("b model");
  status = ingest_and_wait();
  CHECK(status.fingerprint_cache_misses_total == 2);
  CHECK(status.document_count == 2);
}

TEST_CASE("a document is found by model file and tokens") {
  const Bench bench;
  REQUIRE_OK(bench.ingest("abc"));
  const std::vector<uint32_t> ids = {'a', 'b', 'c'};
  const UniqueFd model = bench.open_model();
  lib::AcquireRequest request;
  request.model_fd = model.get();
  request.tokens = ids;
  auto found = lib::acquire(bench.connect(), request);
  REQUIRE_OK(found);
  CHECK(found->lease->document().token_count == 3);
  CHECK(bench.status().fingerprint_cache_hits_total == 1);
}

TEST_CASE("a model file that nobody knows is identified by a worker") {
  const Bench bench;
  const std::vector<uint32_t> ids = {'a'};
  const UniqueFd model = bench.open_model();
  lib::AcquireRequest request;
  request.model_fd = model.get();
  request.tokens = ids;
  CHECK(lib::acquire(bench.connect(), request).status().code() == POLYKV_ERR_NOT_FOUND);
  CHECK(bench.status().worker_count == 1);
  CHECK(bench.status().fingerprint_cache_misses_total == 1);
}

TEST_CASE("a configured model is opened by the daemon, and its documents may be public") {
  const TemporaryFolder models;
  const std::string gone_path = models.path() + "/gone";
  const std::string config =
      models.write("polykvd.toml", "[models]\nhere = \"" + models.write("here", "a model") +
                                       "\"\ngone = \"" + gone_path + "\"\n");
  const Bench bench({"--config", config});
  lib::IngestRequest request;
  request.share_public = true;
  const bool is_shareable = !TestDevice::is_wanted();  // the driver shares within one user
  CHECK(bench.ingest(request, "text").status().code() ==
        (is_shareable ? POLYKV_ERR_PERMISSION : POLYKV_ERR_UNSUPPORTED));
  request.share_public = is_shareable;
  request.model_name = "here";
  const auto lease = bench.ingest(request, "text");
  REQUIRE(message_of(lease) == "");
  CHECK((*lease)->document().is_public == is_shareable);
  request.model_name = "gone";
  const auto gone = bench.ingest(request, "text");
  CHECK(gone.status().code() == POLYKV_ERR_NOT_FOUND);
  CHECK(contains(message_of(gone), "gone"));
  CHECK(contains(message_of(gone), gone_path));
  request.model_name = "unheard of";
  CHECK(bench.ingest(request, "text").status().code() == POLYKV_ERR_NOT_FOUND);
}

TEST_CASE(
    "a name that is taken is refused before anything is computed, unless it may be replaced") {
  const Bench bench;
  lib::IngestRequest request;
  request.name = "n";
  REQUIRE_OK(bench.ingest(request, "one"));
  CHECK(bench.ingest(request, "three").status().code() == POLYKV_ERR_ALREADY_EXISTS);
  CHECK(bench.status().tokens_prefilled_total == 3);
  CHECK_OK(bench.ingest(request, "one"));
  request.replace_name = true;
  CHECK_OK(bench.ingest(request, "three"));
}

TEST_CASE("a worker program that is not there is an error that names it") {
  const IngestBench bench("/nonexistent/polykv-prefill", "/proc/self/exe");
  const auto refused = bench.ingest("text");
  CHECK(refused.status().code() == POLYKV_ERR_WORKER);
  CHECK(contains(message_of(refused), "/nonexistent/polykv-prefill"));
}

TEST_CASE("a worker that does not get ready is ended at its deadline, and who waits is told") {
  const TemporaryFolder folder;
  const std::string program = folder.write("sleeper", "#!/bin/sh\nexec sleep 60\n");
  REQUIRE(::chmod(program.c_str(), 0755) == 0);
  const IngestBench bench(program, "/proc/self/exe", {"--worker-start-deadline", "300ms"});
  const auto refused = bench.ingest("text");
  CHECK(refused.status().code() == POLYKV_ERR_WORKER);
  CHECK(contains(message_of(refused), "within 300 ms"));
  CHECK(contains(message_of(refused), "worker.start_deadline"));
}
