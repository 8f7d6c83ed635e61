// polykvd with the real polykv-prefill, on a tiny model with random weights: what is computed, what
// is refused and how, and what happens when the worker is killed, stopped or confined.
#include <signal.h>

#include <catch2/catch.hpp>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "daemon/prefill/model/model.h"
#include "daemon/prefill/transformer/transformer.h"
#include "kernels/certificate.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/ingest_bench.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

GgufBuilder tiny_model(uint32_t context_length = 32768) {
  GgufBuilder model = tiny_llama();
  model.set_u32("llama.context_length", context_length);
  return model;
}

struct ModelFolder {
  explicit ModelFolder(const std::string& bytes) : path(folder.write("model.gguf", bytes)) {}
  TemporaryFolder folder;
  std::string path;
};

using Flags = std::vector<std::string>;

struct Bench : private ModelFolder, public IngestBench {
  explicit Bench(Flags flags = {}) : Bench(tiny_model().build(), std::move(flags)) {}
  explicit Bench(const std::string& model_bytes, Flags flags = {})
      : ModelFolder(model_bytes), IngestBench(POLYKV_PREFILL_PATH, path, std::move(flags)) {}
};

/// For the tests that need no settings of their own: starting a worker loads the tensor library.
Bench& shared_bench() {
  static Bench bench;
  return bench;
}

uint64_t prefilled_tokens(const Bench& bench) {
  return bench.status().tokens_prefilled_total;
}

/// No two tokens in a row are alike, and nothing merges.
std::string text_of(size_t token_count) {
  std::string text(token_count, ' ');
  for (size_t i = 0; i < token_count; ++i) text[i] = static_cast<char>('A' + i * 7 % 26);
  return text;
}

std::string message_of(const IngestResult& result) {
  return result.status().message();
}

std::vector<uint32_t> tokens_of(const lib::Lease& lease) {
  std::vector<uint32_t> ids(lease.document().token_count);
  REQUIRE_OK(lease.copy_tokens(0, ids.size(), ids.data()));
  return ids;
}

/// The only child of a process: polykvd's worker.
pid_t child_of(pid_t parent) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (!std::isdigit(static_cast<unsigned char>(name[0]))) continue;
    std::ifstream file(entry.path() / "stat");
    std::string text((std::istreambuf_iterator<char>(file)), {});
    // "pid (name) state ppid ...", and the name may hold anything.
    std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
    std::string state;
    pid_t ppid = 0;
    if (fields >> state >> ppid && ppid == parent && state != "Z") return std::stoi(name);
  }
  return 0;
}

std::string status_field(pid_t pid, const std::string& field) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(field + ":\t")) return line.substr(field.size() + 2);
  }
  return "";
}

/// Once the prefill has begun: sends the signal to the worker.
lib::IngestRequest request_with_signal(const Bench& bench, int number) {
  lib::IngestRequest request;
  request.on_progress = [&bench, number,
                         sent = false](const polykv_ingest_progress& progress) mutable {
    if (progress.phase != POLYKV_INGEST_PREFILLING || sent) return true;
    sent = true;
    const pid_t worker = child_of(bench.polykvd().pid());
    REQUIRE(worker > 0);
    REQUIRE(::kill(worker, number) == 0);
    return true;
  };
  return request;
}

double relative_difference(const std::vector<float>& got, const float* expected, size_t stride,
                           uint32_t dim) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double reference = expected[i / dim * stride + i % dim];
    difference += (got[i] - reference) * (got[i] - reference);
    norm += reference * reference;
  }
  return std::sqrt(difference / norm);
}

}  // namespace

TEST_CASE("a document's K and V are those of the model, in every profile") {
  constexpr size_t kTokens = 5000;
  const Bench& bench = shared_bench();
  const uint64_t before = prefilled_tokens(bench);
  const UniqueFd file = bench.open_model();
  const Model model = must(Model::open(file.get(), "tiny"));
  set_thread_count(2);
  Transformer transformer(std::make_shared<const Weights>(must(Weights::load(model, 2))));
  KvCache cache = must(KvCache::create(model.config(), kTokens));

  for (const auto& [profile, segment_count, k_tolerance, v_tolerance] :
       {std::tuple(Profile::exact, 2U, 1e-5, 1e-5), std::tuple(Profile::k8v8, 2U, 0.02, 0.02),
        std::tuple(Profile::k5v4, 2U, 0.06, 0.11), std::tuple(Profile::k8v3, 2U, 0.02, 0.2),
        std::tuple(Profile::paper_k8v3, 1U, 0.05, 0.3)}) {
    INFO(profile_name(profile));
    lib::IngestRequest request;
    request.profile = profile;
    const IngestResult lease = bench.ingest(request, text_of(kTokens));
    REQUIRE(message_of(lease) == "");
    CHECK_OK((*lease)->verify());
    CHECK((*lease)->document().segment_count == segment_count);
    REQUIRE((*lease)->document().token_count == kTokens);
    if (cache.token_count() == 0) REQUIRE_OK(transformer.forward(tokens_of(**lease), cache, {}));
    for (uint32_t layer = 0; layer < 2; ++layer) {
      // The second kv_head, across the boundary between segments.
      const LayerGeometry& geometry = (*lease)->document().identity.layers[layer];
      std::vector<float> k(size_t{2} * 1000 * geometry.k_head_dim);
      std::vector<float> v(k.size());
      lib::DecodeRequest decode;
      decode.first_token = 3500;
      decode.token_count = 1000;
      decode.k = k.data();
      decode.v = v.data();
      decode.k_strides = decode.v_strides = {1000 * geometry.k_head_dim, geometry.k_head_dim, 1};
      REQUIRE_OK((*lease)->decode(layer, decode));
      const size_t half = k.size() / 2;
      const std::vector<float> k_head(k.begin() + static_cast<ptrdiff_t>(half), k.end());
      const std::vector<float> v_head(v.begin() + static_cast<ptrdiff_t>(half), v.end());
      const size_t at = cache.head_stride() + 3500 * cache.token_stride();
      CHECK(relative_difference(k_head, cache.k(layer) + at, cache.token_stride(),
                                geometry.k_head_dim) < k_tolerance);
      CHECK(relative_difference(v_head, cache.v(layer) + at, cache.token_stride(),
                                geometry.v_head_dim) < v_tolerance);
    }
  }
  CHECK(prefilled_tokens(bench) == before + 5 * kTokens);
}

TEST_CASE("a worker certifies what it encodes, and auto keeps every layer within the threshold") {
  const Bench& bench = shared_bench();
  for (const auto profile : {Profile::k4v3, Profile::automatic}) {
    INFO(profile_name(profile));
    lib::IngestRequest request;
    request.profile = profile;
    // A segment of 4,096 tokens, and one that is shorter than the queries that are kept.
    const IngestResult lease = bench.ingest(request, text_of(4100));
    REQUIRE(message_of(lease) == "");
    CHECK_OK((*lease)->verify());
    const lib::DocumentRecord& document = (*lease)->document();
    CHECK(document.profile == profile);
    REQUIRE(document.segment_count == 2);
    for (const lib::LayerQuality& layer : document.layers) {
      CHECK((layer.query_count == 4 || layer.query_count == kCertificateQueries));
      CHECK(layer.relative_error > 0);
      if (profile == Profile::automatic) {
        CHECK(layer.relative_error <= kCertificateThreshold);
        CHECK((layer.profiles & 1U << static_cast<uint32_t>(Profile::k4v3)) == 0);
      }
    }
  }
  // Extended, each new segment is judged by itself.
  lib::IngestRequest request;
  request.profile = Profile::automatic;
  request.name = "judged";
  REQUIRE(message_of(bench.ingest(request, text_of(700))) == "");
  lib::IngestRequest extension;
  extension.profile = Profile::any;
  extension.extend_name = "judged";
  const IngestResult longer = bench.ingest(extension, "and so on");
  REQUIRE(message_of(longer) == "");
  CHECK((*longer)->document().profile == Profile::automatic);
  CHECK((*longer)->document().segment_count == 2);
}

TEST_CASE("what stands before a text is BOS, the chat's head, and the caller's own text") {
  const Bench& bench = shared_bench();
  const UniqueFd file = bench.open_model();
  const Model model = must(Model::open(file.get(), "tiny"));
  const Tokenizer tokenizer = must(Tokenizer::from_gguf(model.gguf()));
  const auto ids_of = [&](const std::string& text, bool parse_special) {
    return must(tokenizer.encode(text, {false, parse_special}));
  };
  const auto append = [](std::vector<uint32_t>& ids, const std::vector<uint32_t>& more) {
    ids.insert(ids.end(), more.begin(), more.end());
  };
  const std::string text = "hello <|im_end|>";
  const UniqueFd before = text_file("<|im_start|>note");
  lib::IngestRequest request;

  SECTION("nothing by default, and special tokens in a text stay text") {
    CHECK(tokens_of(*must(bench.ingest(text))) == ids_of(text, false));
  }
  SECTION("all of it, and special tokens are parsed in what the caller put before") {
    request.add_bos = true;
    request.chat_head = true;
    request.before_fd = before.get();
    std::vector<uint32_t> expected = {*tokenizer.bos_id()};
    append(expected, ids_of(must(chat_frame_from_gguf(model.gguf())).head, true));
    append(expected, ids_of("<|im_start|>note", true));
    append(expected, ids_of(text, false));
    CHECK(tokens_of(*must(bench.ingest(request, text))) == expected);
  }
  SECTION("special tokens in a text, when the caller trusts it") {
    request.parse_special = true;
    const auto expected = ids_of(text, true);
    CHECK(expected != ids_of(text, false));
    CHECK(tokens_of(*must(bench.ingest(request, text))) == expected);
  }
}

TEST_CASE("token ids give the same document as the text that they come from") {
  const Bench& bench = shared_bench();
  const uint64_t before = prefilled_tokens(bench);
  const auto from_text = must(bench.ingest("hello world"));
  const std::vector<uint32_t> ids = tokens_of(*from_text);
  const UniqueFd model = bench.open_model();
  lib::IngestRequest request;
  request.model_fd = model.get();
  request.tokens = ids;
  const auto from_ids = must(lib::ingest(bench.connect(), request));
  CHECK(from_ids->document().digest == from_text->document().digest);
  CHECK(prefilled_tokens(bench) == before + ids.size());
  const std::vector<uint32_t> unknown = {1, 263};
  request.tokens = unknown;
  CHECK(lib::ingest(bench.connect(), request).status().code() == POLYKV_ERR_INVALID_ARGUMENT);
}

TEST_CASE("a text may come through a pipe") {
  const Bench& bench = shared_bench();
  const UniqueFd model = bench.open_model();
  const UniqueFd reader = text_pipe("hello");
  lib::IngestRequest request;
  request.model_fd = model.get();
  request.text_fd = reader.get();
  CHECK(must(lib::ingest(bench.connect(), request))->document().token_count == 1);
}

TEST_CASE("eight simultaneous ingests of one text prefill it once") {
  const Bench& bench = shared_bench();
  const uint64_t before = prefilled_tokens(bench);
  std::vector<std::thread> agents;
  std::vector<Status> results(8);
  for (Status& result : results)
    agents.emplace_back([&] { result = bench.ingest("#" + text_of(1999)).status(); });
  for (std::thread& agent : agents) agent.join();
  for (const Status& result : results) CHECK(result.message() == "");
  CHECK(prefilled_tokens(bench) == before + 2000);
}

TEST_CASE("the worker is locked down, and has only the descriptors that it needs") {
  const Bench& bench = shared_bench();
  REQUIRE(message_of(bench.ingest("hello")) == "");
  const pid_t worker = child_of(bench.polykvd().pid());
  REQUIRE(worker > 0);
  CHECK(status_field(worker, "Seccomp") == "2");
  CHECK(status_field(worker, "NoNewPrivs") == "1");
  size_t count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(worker) + "/fd")) {
    static_cast<void>(entry);
    ++count;
  }
  // /dev/null twice, standard error, the daemon's socket, the model, /proc/meminfo.
  CHECK(count == 6);
}

TEST_CASE("a worker that is killed while it prefills fails its caller alone") {
  const Bench& bench = shared_bench();
  const auto other = bench.connect();
  const IngestResult kept = bench.ingest({}, "kept", other);
  REQUIRE(message_of(kept) == "");
  const IngestResult lost = bench.ingest(request_with_signal(bench, SIGKILL), text_of(20000));
  CHECK(lost.status().code() == POLYKV_ERR_WORKER);
  CHECK(contains(message_of(lost), "signal 9"));
  CHECK_OK((*kept)->verify());
  CHECK(message_of(bench.ingest({}, "next", other)) == "");
}

TEST_CASE("a worker that is stopped while it prefills loses its ticket, and is replaced") {
  Bench bench(Flags{"--stall-deadline", "2s"});
  const IngestResult lost = bench.ingest(request_with_signal(bench, SIGSTOP), text_of(20000));
  CHECK(lost.status().code() == POLYKV_ERR_PRODUCER_LOST);
  CHECK(message_of(bench.ingest("next")) == "");
  CHECK(bench.status().worker_count == 1);
}

TEST_CASE("a cancelled prefill stops early, and the worker goes on with the next") {
  Bench& bench = shared_bench();
  const uint64_t before = prefilled_tokens(bench);
  lib::IngestRequest request;
  request.on_progress = [](const polykv_ingest_progress& progress) {
    return progress.phase != POLYKV_INGEST_PREFILLING || progress.tokens_done == 0;
  };
  CHECK(bench.ingest(request, text_of(30000)).status().code() == POLYKV_ERR_CANCELLED);
  CHECK(message_of(bench.ingest("after it")) == "");
  CHECK(bench.status().worker_count == 1);
  CHECK(prefilled_tokens(bench) < before + 30000);
}

TEST_CASE("an idle worker gives its memory back") {
  const Bench bench(Flags{"--worker-idle", "20ms"});
  REQUIRE(message_of(bench.ingest("hello")) == "");
  bench.wait_until_no_worker();
  CHECK(contains(bench.polykvd().log(), "exited with status 0"));
}

TEST_CASE("the memory that a prefill needs is stated before it starts, and refused when too much") {
  uint64_t stated = 0;
  lib::IngestRequest request;
  request.on_progress = [&](const polykv_ingest_progress& progress) {
    // Not only at token 0: another test's document may have left the text's prefix.
    if (progress.phase == POLYKV_INGEST_PREFILLING && stated == 0) stated = progress.memory_bytes;
    return true;
  };
  SECTION("enough") {
    // A text that no other test begins with, so that nothing of it is there.
    REQUIRE(message_of(shared_bench().ingest(request, "&" + text_of(5000))) == "");
    CHECK(stated > 5001 * 2 * 2 * 2 * 16 * 4);  // at least the KV cache
  }
  SECTION("a limit below it") {
    const Bench bench(Flags{"--worker-memory-limit", "1MiB"});
    const IngestResult refused = bench.ingest(request, text_of(5000));
    CHECK(refused.status().code() == POLYKV_ERR_BUDGET);
    CHECK(contains(message_of(refused), "needs"));
    CHECK(contains(message_of(refused), "1 MiB"));
    CHECK(stated == 0);
    CHECK(bench.status().tokens_prefilled_total == 0);
  }
  SECTION("a control group that has less, until it has more") {
    const TemporaryFolder fake;
    fake.write("cgroup/box/memory.max", std::to_string(4 << 20));
    fake.write("cgroup/box/memory.current", std::to_string(3 << 20));
    const Bench bench(Flags{"--cgroup-root", fake.path() + "/cgroup", "--proc-self-cgroup",
                            fake.write("self", "0::/box\n"), "--memory-reserve", "0"});
    const IngestResult refused = bench.ingest(request, text_of(5000));
    CHECK(refused.status().code() == POLYKV_ERR_BUDGET);
    CHECK(contains(message_of(refused), "polykvd's control group has 1 MiB"));
    CHECK(stated == 0);
    fake.write("cgroup/box/memory.max", std::to_string(256 << 20));
    CHECK(message_of(bench.ingest(request, text_of(5000))) == "");
    CHECK(stated != 0);
  }
}

TEST_CASE("what polykvd's budget does not hold is refused") {
  const Bench bench(Flags{"--budget", "64KiB"});
  const IngestResult refused = bench.ingest(text_of(5000));
  CHECK(refused.status().code() == POLYKV_ERR_BUDGET);
  CHECK(bench.status().document_count == 0);
}

TEST_CASE("documents that the model cannot take are refused, and say why") {
  const Bench bench(tiny_model(100).build());
  CHECK(bench.ingest("").status().code() == POLYKV_ERR_EMPTY_DOCUMENT);
  const IngestResult too_long = bench.ingest(text_of(101));
  CHECK(too_long.status().code() == POLYKV_ERR_CONTEXT_EXCEEDED);
  CHECK(contains(message_of(too_long), "101"));
  CHECK(contains(message_of(too_long), "100"));
  CHECK(message_of(bench.ingest(text_of(100))) == "");
  lib::IngestRequest request;
  request.profile = static_cast<Profile>(9);
  CHECK(bench.ingest(request, "hello").status().code() == POLYKV_ERR_INVALID_ARGUMENT);
}

TEST_CASE("a model that is no good is refused, and says why") {
  GgufBuilder other = tiny_model();
  other.set_string("general.architecture", "mamba");
  const IngestResult unknown = Bench(other.build()).ingest("hello");
  CHECK(unknown.status().code() == POLYKV_ERR_MODEL_UNSUPPORTED);
  CHECK(contains(message_of(unknown), "mamba"));
  const std::string whole = tiny_model().build();
  CHECK(Bench(whole.substr(0, whole.size() / 2)).ingest("hello").status().code() ==
        POLYKV_ERR_MODEL_FORMAT);
  CHECK(Bench("no model at all, but long enough to look at").ingest("hello").status().code() ==
        POLYKV_ERR_MODEL_FORMAT);
  CHECK(Bench("").ingest("hello").status().code() == POLYKV_ERR_MODEL_FORMAT);
}
