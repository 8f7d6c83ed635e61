// Prefill and decode steps of the real model against transformers in fp32 (tests/data/smollm2).
#include "daemon/prefill/transformer/transformer.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/model.h"
#include "tests/support/npy.h"
#include "tests/support/relative_error.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using test::relative_error;

namespace {

constexpr double kTolerance = 1e-4;  // norm of the difference / norm of the reference
constexpr uint32_t kReferenceLayers[] = {0, 14, 29};

std::string data(const std::string& name) {
  return std::string(POLYKV_TEST_DATA_DIR "/smollm2/") + name;
}

struct Reference {
  std::vector<uint32_t> ids;
  std::vector<uint32_t> positions;
  std::vector<float> logits = test::load_npy<float>(data("logits_last.npy"), "<f4").values;
  std::map<uint32_t, std::vector<float>> k;  // by layer: [kv_head, position, head_dim]
  std::map<uint32_t, std::vector<float>> v;
  std::vector<uint32_t> greedy;

  Reference() {
    for (const int32_t id : test::load_npy<int32_t>(data("gpl3_ids.npy"), "<i4").values) {
      ids.push_back(static_cast<uint32_t>(id));
    }
    for (const int32_t at : test::load_npy<int32_t>(data("positions.npy"), "<i4").values) {
      positions.push_back(static_cast<uint32_t>(at));
    }
    for (const uint32_t layer : kReferenceLayers) {
      k[layer] =
          test::load_npy<float>(data("k_layer" + std::to_string(layer) + ".npy"), "<f4").values;
      v[layer] =
          test::load_npy<float>(data("v_layer" + std::to_string(layer) + ".npy"), "<f4").values;
    }
    greedy = nlohmann::json::parse(test::read_file(data("greedy.json")))["greedy_32"]
                 .get<std::vector<uint32_t>>();
  }
};

const Reference& reference() {
  static const Reference kReference;
  return kReference;
}

std::shared_ptr<const Weights> weights() {
  static const std::shared_ptr<const Weights> kWeights = [] {
    set_thread_count(std::max(1U, std::thread::hardware_concurrency()));
    const UniqueFd fd = test::open_file(test::model_path_or_skip());
    const Model model = Model::open(fd.get(), "SmolLM2").value();
    return std::make_shared<const Weights>(Weights::load(model, 2).value());
  }();
  return kWeights;
}

/// The cache's rows at the reference's positions below `token_count`, for K or V of a layer,
/// against the reference.
double cache_error(const KvCache& cache, uint32_t layer, bool is_k, uint32_t token_count) {
  const std::vector<float>& expected = is_k ? reference().k.at(layer) : reference().v.at(layer);
  const float* base = is_k ? cache.k(layer) : cache.v(layer);
  const size_t dim = cache.head_dim();
  const size_t position_count = reference().positions.size();
  std::vector<float> ours;
  std::vector<float> theirs;
  for (size_t head = 0; head < cache.kv_head_count(); ++head) {
    for (size_t i = 0; i < position_count && reference().positions[i] < token_count; ++i) {
      const float* row =
          base + head * cache.head_stride() + reference().positions[i] * cache.token_stride();
      ours.insert(ours.end(), row, row + dim);
      const float* other = &expected[(head * position_count + i) * dim];
      theirs.insert(theirs.end(), other, other + dim);
    }
  }
  return relative_error(ours.data(), theirs.data(), ours.size());
}

void check_cache(const KvCache& cache, uint32_t token_count) {
  for (const uint32_t layer : kReferenceLayers) {
    const double k_error = cache_error(cache, layer, true, token_count);
    const double v_error = cache_error(cache, layer, false, token_count);
    std::printf("layer %2u: K %.2e, V %.2e\n", layer, k_error, v_error);
    CHECK(k_error <= kTolerance);
    CHECK(v_error <= kTolerance);
  }
}

}  // namespace

TEST_CASE(
    "a prefill of all of GPL-3 gives the reference's K, V, last logits and greedy continuation") {
  const std::vector<uint32_t>& ids = reference().ids;
  Transformer transformer(weights());
  KvCache cache =
      KvCache::create(transformer.config(), static_cast<uint32_t>(ids.size()) + 64).value();
  std::vector<float> logits(transformer.config().vocab_size);
  std::vector<uint32_t> progress;
  ForwardOptions options;
  options.progress = [&](uint32_t done, uint32_t total) {
    CHECK(total == ids.size());
    progress.push_back(done);
    return true;
  };
  REQUIRE_OK(transformer.forward(ids, cache, logits, options));
  CHECK(cache.token_count() == ids.size());
  CHECK(progress.size() == 15);  // ceil(7,639 / 512)
  CHECK(progress.back() == ids.size());
  check_cache(cache, cache.token_count());
  const double logits_error =
      relative_error(logits.data(), reference().logits.data(), logits.size());
  std::printf("last logits: %.2e\n", logits_error);
  CHECK(logits_error <= kTolerance);

  std::vector<uint32_t> continuation;
  while (continuation.size() < reference().greedy.size()) {
    const uint32_t next = argmax(logits);
    continuation.push_back(next);
    REQUIRE_OK(transformer.forward(std::span(&next, 1), cache, logits));
  }
  CHECK(continuation == reference().greedy);
}

TEST_CASE("K and V do not depend on the chunk size beyond rounding") {
  const uint32_t chunk_tokens = GENERATE(1U, 20U, 100U, 512U, 2048U);
  const uint32_t token_count = chunk_tokens == 1 ? 40 : 514;
  Transformer transformer(weights());
  KvCache cache = KvCache::create(transformer.config(), token_count).value();
  ForwardOptions options;
  options.chunk_tokens = chunk_tokens;
  REQUIRE_OK(
      transformer.forward(std::span(reference().ids).first(token_count), cache, {}, options));
  std::printf("chunk %u\n", chunk_tokens);
  check_cache(cache, token_count);
}

TEST_CASE("a suffix over a cache that somebody else filled gives the same logits as one prefill") {
  const auto ids = std::span(reference().ids).first(700);
  Transformer transformer(weights());
  KvCache whole = KvCache::create(transformer.config(), 700).value();
  std::vector<float> expected(transformer.config().vocab_size);
  REQUIRE_OK(transformer.forward(ids, whole, expected));

  KvCache other = KvCache::create(transformer.config(), 1000).value();
  for (uint32_t layer = 0; layer < whole.layer_count(); ++layer) {
    for (uint32_t head = 0; head < whole.kv_head_count(); ++head) {
      const size_t floats = 680 * whole.token_stride();
      std::copy_n(whole.k(layer) + head * whole.head_stride(), floats,
                  other.k(layer) + head * other.head_stride());
      std::copy_n(whole.v(layer) + head * whole.head_stride(), floats,
                  other.v(layer) + head * other.head_stride());
    }
  }
  other.set_token_count(680);
  std::vector<float> logits(expected.size());
  REQUIRE_OK(transformer.forward(ids.subspan(680), other, logits));
  CHECK(relative_error(logits.data(), expected.data(), logits.size()) <= kTolerance);

  other.set_token_count(680);  // truncated and done again, token by token
  for (const uint32_t id : ids.subspan(680))
    REQUIRE_OK(transformer.forward(std::span(&id, 1), other, logits));
  CHECK(relative_error(logits.data(), expected.data(), logits.size()) <= kTolerance);
}

namespace {

/// The tokens of a cache, attended to in double precision, a row at a time.
class CachePrefix final : public Prefix {
 public:
  explicit CachePrefix(const KvCache& cache) : cache_(cache) {}
  uint32_t token_count() const override { return cache_.token_count(); }
  Status attend(const PrefixQueries& queries, float* output, float* log_sum_exp) const override {
    if (queries.layer == failing_layer) return {POLYKV_ERR_BUSY, "the prefix is away"};
    const size_t dim = cache_.head_dim();
    for (uint32_t row = 0; row < queries.row_count; ++row) {
      for (uint32_t head = 0; head < queries.head_count; ++head) {
        const size_t at = size_t{row} * queries.head_count + head;
        const float* q = queries.q + row * queries.q_stride + head * dim;
        const uint32_t kv_head = head / (queries.head_count / cache_.kv_head_count());
        log_sum_exp[at] = attend_row(q, queries.layer, kv_head, output + at * dim);
      }
    }
    return Status::ok();
  }

  uint32_t failing_layer = UINT32_MAX;

 private:
  float attend_row(const float* q, uint32_t layer, uint32_t kv_head, float* output) const {
    const size_t dim = cache_.head_dim();
    const float* keys = cache_.k(layer) + kv_head * cache_.head_stride();
    const float* values = cache_.v(layer) + kv_head * cache_.head_stride();
    std::vector<double> sums(dim);
    double sum = 0;
    for (uint32_t token = 0; token < cache_.token_count(); ++token) {
      double logit = 0;
      for (size_t i = 0; i < dim; ++i)
        logit += static_cast<double>(q[i]) * static_cast<double>(keys[token * dim + i]);
      const double weight = std::exp(logit / std::sqrt(static_cast<double>(dim)));
      sum += weight;
      for (size_t i = 0; i < dim; ++i)
        sums[i] += weight * static_cast<double>(values[token * dim + i]);
    }
    for (size_t i = 0; i < dim; ++i) output[i] = static_cast<float>(sums[i] / sum);
    return static_cast<float>(std::log(sum));
  }

  const KvCache& cache_;
};

}  // namespace

TEST_CASE("a suffix behind a prefix that lives elsewhere gives the same logits as one prefill") {
  const auto ids = std::span(reference().ids).first(300);
  Transformer transformer(weights());
  KvCache whole = KvCache::create(transformer.config(), 300).value();
  REQUIRE_OK(transformer.forward(ids.first(200), whole, {}));
  std::vector<float> expected(ids.subspan(200).size() * transformer.config().vocab_size);
  REQUIRE_OK(transformer.forward(ids.subspan(200), whole, expected));

  KvCache document = KvCache::create(transformer.config(), 200).value();
  REQUIRE_OK(transformer.forward(ids.first(200), document, {}));
  CachePrefix prefix(document);
  ForwardOptions options;
  options.prefix = &prefix;
  options.chunk_tokens = 64;  // the second chunk attends to prefix, cache and itself
  KvCache suffix = KvCache::create(transformer.config(), 100).value();
  std::vector<float> logits(expected.size());
  REQUIRE_OK(transformer.forward(ids.subspan(200), suffix, logits, options));
  CHECK(suffix.token_count() == 100);
  CHECK(relative_error(logits.data(), expected.data(), logits.size()) <= kTolerance);

  suffix.set_token_count(0);  // token by token, without the matrix products
  const size_t vocabulary = transformer.config().vocab_size;
  for (size_t i = 0; i < 5; ++i) {
    const auto one = std::span(logits).first(vocabulary);
    REQUIRE_OK(transformer.forward(ids.subspan(200 + i, 1), suffix, one, options));
    CHECK(relative_error(one.data(), &expected[i * vocabulary], vocabulary) <= kTolerance);
  }
  // Neither an error of the prefix nor a sequence that is too long only because of it is passed over.
  prefix.failing_layer = 3;
  CHECK(transformer.forward(ids.first(1), suffix, {}, options).code() == POLYKV_ERR_BUSY);
  CHECK(suffix.token_count() == 5);
  KvCache large = KvCache::create(transformer.config(), 8192).value();
  const std::vector<uint32_t> too_long(8192 - 199, 5);
  CHECK(transformer.forward(too_long, large, {}, options).code() == POLYKV_ERR_CONTEXT_EXCEEDED);
}

TEST_CASE("logits of every row are those of one token after the other, whatever the chunk") {
  const auto ids = std::span(reference().ids).first(30);
  Transformer transformer(weights());
  const size_t vocabulary = transformer.config().vocab_size;
  KvCache whole = KvCache::create(transformer.config(), 30).value();
  std::vector<float> all(ids.size() * vocabulary);
  ForwardOptions options;
  options.chunk_tokens = 20;
  REQUIRE_OK(transformer.forward(ids, whole, all, options));
  KvCache steps = KvCache::create(transformer.config(), 30).value();
  std::vector<float> one(vocabulary);
  for (size_t i = 0; i < ids.size(); ++i) {
    REQUIRE_OK(transformer.forward(ids.subspan(i, 1), steps, one));
    CHECK(relative_error(&all[i * vocabulary], one.data(), vocabulary) <= kTolerance);
  }
  std::vector<float> two(2 * vocabulary);
  CHECK(transformer.forward(ids.first(3), steps, two).code() == POLYKV_ERR_INVALID_ARGUMENT);
}

TEST_CASE("progress cancels a prefill, and the cache keeps the chunks that were done") {
  Transformer transformer(weights());
  KvCache cache = KvCache::create(transformer.config(), 512).value();
  ForwardOptions options;
  options.chunk_tokens = 16;
  options.progress = [](uint32_t done, uint32_t) { return done < 48; };
  const Status status =
      transformer.forward(std::span(reference().ids).first(512), cache, {}, options);
  CHECK(status.code() == POLYKV_ERR_CANCELLED);
  CHECK(cache.token_count() == 48);
}

TEST_CASE("what does not fit is refused with a code of its own") {
  Transformer transformer(weights());
  KvCache cache = KvCache::create(transformer.config(), 64).value();
  const std::vector<uint32_t> too_long(8193, 5);
  CHECK(transformer.forward(too_long, cache, {}).code() == POLYKV_ERR_CONTEXT_EXCEEDED);
  CHECK(transformer.forward(std::span(too_long).first(65), cache, {}).code() ==
        POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(transformer.forward({}, cache, {}).code() == POLYKV_ERR_INVALID_ARGUMENT);
  const uint32_t no_such_id = transformer.config().vocab_size;
  CHECK(transformer.forward(std::span(&no_such_id, 1), cache, {}).code() ==
        POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(cache.token_count() == 0);
}
