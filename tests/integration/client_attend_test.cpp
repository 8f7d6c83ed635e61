// Attention in place against plain attention in double precision over the decoded document.
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <optional>

#include "kernels/half.h"
#include "tests/support/daemon_process.h"
#include "tests/support/require_ok.h"
#include "tests/support/synthetic_document.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

/// K and V of one layer as dense fp32 [token, kv_head, dim].
struct PlainCache {
  polykv_layer_geometry geometry;
  std::vector<float> k;
  std::vector<float> v;
  uint64_t token_count() const { return k.size() / (geometry.kv_head_count * geometry.k_head_dim); }
};

PlainCache decoded(const client::Lease& lease, uint32_t layer) {
  const client::DocumentInfo info = lease.info();
  PlainCache cache{info.model->layers[layer], {}, {}};
  const uint64_t rows = info.token_count * cache.geometry.kv_head_count;
  cache.k.resize(rows * cache.geometry.k_head_dim);
  cache.v.resize(rows * cache.geometry.v_head_dim);
  client::DecodeOptions options;
  options.token_count = info.token_count;
  options.k = cache.k.data();
  options.v = cache.v.data();
  REQUIRE_OK(lease.decode(layer, options));
  return cache;
}

/// Queries [row, head, dim], and everything else that a call says.
struct Question {
  uint32_t rows = 1;
  uint32_t heads = 2;
  uint64_t first = 0;
  uint64_t count = 0;
  float scale = 0;
  float soft_cap = 0;
  std::vector<uint64_t> first_tokens;
  uint32_t threads = 1;
  std::vector<float> q;
};

Question question(const PlainCache& cache, uint32_t rows, uint32_t group) {
  Question result;
  result.rows = rows;
  result.heads = group * cache.geometry.kv_head_count;
  result.count = cache.token_count();
  for (uint32_t i = 0; i < rows * result.heads * cache.geometry.k_head_dim; ++i)
    result.q.push_back(3 * synthetic_value(true, 7, i, 3, 5));
  return result;
}

struct Answer {
  std::vector<float> output;  // [row, head, v_head_dim]
  std::vector<float> log_sum_exp;
};

Answer plain_attention(const PlainCache& cache, const Question& asked) {
  const auto& geometry = cache.geometry;
  const uint32_t group = asked.heads / geometry.kv_head_count;
  const double scale =
      asked.scale != 0 ? asked.scale : 1 / std::sqrt(double{1} * geometry.k_head_dim);
  Answer answer;
  for (uint32_t row = 0; row < asked.rows; ++row) {
    for (uint32_t head = 0; head < asked.heads; ++head) {
      const float* q = &asked.q[(row * asked.heads + head) * geometry.k_head_dim];
      std::vector<double> logits;
      uint64_t first = asked.first;
      if (!asked.first_tokens.empty()) first = std::max(first, asked.first_tokens[row]);
      for (uint64_t token = first; token < asked.first + asked.count; ++token) {
        const uint64_t at = token * geometry.kv_head_count + head / group;
        double logit = 0;
        for (uint32_t i = 0; i < geometry.k_head_dim; ++i)
          logit += double{q[i]} * cache.k[at * geometry.k_head_dim + i];
        logit *= scale;
        if (asked.soft_cap > 0) logit = asked.soft_cap * std::tanh(logit / asked.soft_cap);
        logits.push_back(logit);
      }
      double sum = 0;
      const double most = logits.empty() ? 0 : *std::max_element(logits.begin(), logits.end());
      std::vector<double> output(geometry.v_head_dim, 0.0);
      for (size_t i = 0; i < logits.size(); ++i) {
        const double weight = std::exp(logits[i] - most);
        const uint64_t at = (first + i) * geometry.kv_head_count + head / group;
        for (uint32_t d = 0; d < geometry.v_head_dim; ++d)
          output[d] += weight * cache.v[at * geometry.v_head_dim + d];
        sum += weight;
      }
      for (const double value : output)
        answer.output.push_back(sum == 0 ? 0.0F : static_cast<float>(value / sum));
      answer.log_sum_exp.push_back(sum == 0 ? kNothing : static_cast<float>(most + std::log(sum)));
    }
  }
  return answer;
}

client::AttendOptions options_of(const Question& asked) {
  client::AttendOptions options;
  options.first_token = asked.first;
  options.token_count = asked.count;
  options.query_count = asked.rows;
  options.head_count = asked.heads;
  options.q = asked.q.data();
  options.scale = asked.scale;
  options.soft_cap = asked.soft_cap;
  if (!asked.first_tokens.empty()) options.query_first_tokens = asked.first_tokens.data();
  options.thread_count = asked.threads;
  return options;
}

Answer attention(const client::Lease& lease, uint32_t layer, const Question& asked) {
  const uint32_t v_dim = lease.info().model->layers[layer].v_head_dim;
  Answer answer{std::vector<float>(asked.rows * asked.heads * v_dim, NAN),
                std::vector<float>(asked.rows * asked.heads, NAN)};
  client::AttendOptions options = options_of(asked);
  options.output = answer.output.data();
  options.log_sum_exp = answer.log_sum_exp.data();
  const auto attended = lease.attend(layer, options);
  INFO((attended.ok() ? "" : attended.error().message));
  REQUIRE_OK(attended);
  return answer;
}

float difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  float worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // minus infinity is equal to itself
    const float apart = std::abs(a[i] - b[i]);
    worst = std::max(worst, std::isnan(apart) ? INFINITY : apart);
  }
  return worst;
}
float difference(const Answer& a, const Answer& b) {
  return std::max(difference(a.output, b.output), difference(a.log_sum_exp, b.log_sum_exp));
}

// Of fp32 sums over a thousand values of size 1.
constexpr float kTolerance = 2e-5F;
// Quantised profiles may be read with queries and weights of 15 bits.
constexpr float kPackedTolerance = 1e-4F;
constexpr float tolerance_of(polykv_profile profile) {
  return profile == POLYKV_PROFILE_EXACT || profile == POLYKV_PROFILE_PAPER_K8V3 ? kTolerance
                                                                                 : kPackedTolerance;
}

struct Bench {
  Bench() : session(connect_to(daemon.socket_path())) {}
  client::Lease publish(const SyntheticDocument& document, uint64_t segment_tokens = 0) {
    return document.publish(session, nullptr, segment_tokens);
  }
  DaemonProcess daemon;
  client::Session session;
};

}  // namespace

TEST_CASE("attention over several segments is that over the decoded document, in every profile") {
  Bench bench;
  SyntheticDocument document(1100);
  for (const polykv_profile profile :
       {POLYKV_PROFILE_EXACT, POLYKV_PROFILE_K8V8, POLYKV_PROFILE_K6V5, POLYKV_PROFILE_K5V4,
        POLYKV_PROFILE_K8V3, POLYKV_PROFILE_K4V3, POLYKV_PROFILE_PAPER_K8V3}) {
    // Of device memory the same code reads a copy.
    if (TestDevice::is_wanted() && profile != POLYKV_PROFILE_K5V4) continue;
    document.profile = profile;
    const bool is_one_segment = profile == POLYKV_PROFILE_PAPER_K8V3;
    const client::Lease lease = bench.publish(document, is_one_segment ? 0 : 300);
    for (uint32_t layer = 0; layer < document.layers.size(); ++layer) {
      const PlainCache cache = decoded(lease, layer);
      for (const auto& [rows, group] : {std::pair(1U, 1U), {1U, 4U}, {3U, 2U}, {70U, 3U}}) {
        CAPTURE(profile, layer, rows, group);
        const Question asked = question(cache, rows, group);
        CHECK(difference(attention(lease, layer, asked), plain_attention(cache, asked)) <
              tolerance_of(profile));
      }
    }
  }
}

TEST_CASE("any range, windows of the rows, scale, soft-cap, and any number of threads") {
  Bench bench;
  SyntheticDocument document(1100);
  document.profile = POLYKV_PROFILE_K8V8;
  const client::Lease lease = bench.publish(document, 512);
  const PlainCache cache = decoded(lease, 0);
  Question asked = question(cache, 5, 2);
  for (const auto& [first, count] :
       {std::pair(0U, 1U), {3U, 2U}, {63U, 2U}, {500U, 24U}, {511U, 589U}, {1099U, 1U}, {7U, 0U}}) {
    CAPTURE(first, count);
    asked.first = first;
    asked.count = count;
    CHECK(difference(attention(lease, 0, asked), plain_attention(cache, asked)) < kPackedTolerance);
  }
  asked.first = 10;
  asked.count = 1000;
  asked.first_tokens = {0, 11, 512, 1009, 1010};  // the last sees nothing
  CHECK(attention(lease, 0, asked).log_sum_exp.back() == kNothing);
  CHECK(difference(attention(lease, 0, asked), plain_attention(cache, asked)) < kPackedTolerance);
  asked.soft_cap = 2;
  asked.scale = 0.7F;
  for (const uint32_t threads : {0U, 1U, 2U, 5U, 64U}) {
    CAPTURE(threads);
    asked.threads = threads;
    const Answer answer = attention(lease, 0, asked);
    CHECK(difference(answer, plain_attention(cache, asked)) < kPackedTolerance);
    CHECK(answer.output == attention(lease, 0, asked).output);  // the same bits again
  }
}

TEST_CASE("a document and the caller's own suffix join exactly") {
  Bench bench;
  const SyntheticDocument document(900);
  const client::Lease lease = bench.publish(document, 256);
  const PlainCache whole = decoded(lease, 1);
  Question asked = question(whole, 4, 3);
  const Answer expected = plain_attention(whole, asked);
  // The last 150 tokens stand for the suffix.
  Question before = asked;
  before.count = 750;
  Question behind = asked;
  behind.first = 750;
  behind.count = 150;
  Answer pool = attention(lease, 1, before);
  const Answer suffix = plain_attention(whole, behind);
  const Answer nothing{std::vector<float>(pool.output.size(), NAN),
                       std::vector<float>(pool.log_sum_exp.size(), kNothing)};
  const polykv_attention_result results[] = {{nothing.output.data(), nothing.log_sum_exp.data()},
                                             {pool.output.data(), pool.log_sum_exp.data()},
                                             {suffix.output.data(), suffix.log_sum_exp.data()}};
  const uint64_t rows = pool.log_sum_exp.size();
  // Into one of the results.
  REQUIRE(polykv_attention_merge(results, 3, rows, whole.geometry.v_head_dim, POLYKV_F32,
                                 pool.output.data(), pool.log_sum_exp.data()) == POLYKV_OK);
  CHECK(difference(pool, expected) < kTolerance);
  REQUIRE(polykv_attention_merge(results, 1, rows, whole.geometry.v_head_dim, POLYKV_F32,
                                 pool.output.data(), pool.log_sum_exp.data()) == POLYKV_OK);
  CHECK(pool.output == std::vector<float>(pool.output.size(), 0.0F));
  CHECK(pool.log_sum_exp == nothing.log_sum_exp);
}

TEST_CASE("queries and outputs of any dtype and strides") {
  Bench bench;
  const SyntheticDocument document(300);
  const client::Lease lease = bench.publish(document);
  const PlainCache cache = decoded(lease, 0);
  Question asked = question(cache, 3, 2);
  const uint32_t k_dim = cache.geometry.k_head_dim;
  const uint32_t v_dim = cache.geometry.v_head_dim;
  for (const polykv_dtype dtype : {POLYKV_F16, POLYKV_BF16}) {
    const auto narrow = dtype == POLYKV_F16 ? f16_from_f32 : bf16_from_f32;
    const auto widen = dtype == POLYKV_F16 ? f32_from_f16 : f32_from_bf16;
    for (float& value : asked.q) value = widen(narrow(value));
    const Answer expected = plain_attention(cache, asked);
    // [head, dim, row], backwards in rows.
    std::vector<uint16_t> q(asked.q.size());
    std::vector<uint16_t> output(expected.output.size(), 0xffff);
    const auto strides = [&](uint32_t dims) {
      return polykv_query_strides{-1, int64_t{3} * dims, 3};
    };
    for (uint32_t row = 0; row < 3; ++row) {
      for (uint32_t head = 0; head < asked.heads; ++head) {
        for (uint32_t i = 0; i < k_dim; ++i)
          q[(head * k_dim + i) * 3 + 2 - row] =
              narrow(asked.q[(row * asked.heads + head) * k_dim + i]);
      }
    }
    client::AttendOptions options = options_of(asked);
    options.query_dtype = options.output_dtype = dtype;
    options.q = q.data() + 2;
    options.q_strides = strides(k_dim);
    options.output = output.data() + 2;
    options.output_strides = strides(v_dim);
    REQUIRE_OK(lease.attend(0, options));
    float worst = 0;
    for (uint32_t row = 0; row < 3; ++row) {
      for (uint32_t head = 0; head < asked.heads; ++head) {
        for (uint32_t i = 0; i < v_dim; ++i) {
          worst =
              std::max(worst, std::abs(widen(output[(head * v_dim + i) * 3 + 2 - row]) -
                                       expected.output[(row * asked.heads + head) * v_dim + i]));
        }
      }
    }
    CHECK(worst < (dtype == POLYKV_F16 ? 1e-3F : 8e-3F));
  }
}

TEST_CASE("what cannot be attended to is refused, and says why") {
  Bench bench;
  const SyntheticDocument document(300);
  const client::Lease lease = bench.publish(document);
  const PlainCache cache = decoded(lease, 0);
  const Question good = question(cache, 2, 2);
  const auto message = [&](uint32_t layer, Question asked, auto change) {
    std::vector<float> output(2 * asked.heads * 64);
    client::AttendOptions options = options_of(asked);
    options.output = output.data();
    change(options);
    const auto result = lease.attend(layer, options);
    return result.ok() ? std::string() : result.error().message;
  };
  const auto as_it_is = [](client::AttendOptions&) {};
  CHECK_THAT(message(2, good, as_it_is), Catch::Contains("layer 2: the document has 2 layers"));
  CHECK_THAT(message(0, good, [](auto& o) { o.head_count = 3; }), Catch::Contains("no multiple"));
  CHECK_THAT(message(0, good, [](auto& o) { o.head_count = 0; }), Catch::Contains("no multiple"));
  CHECK_THAT(message(0, good, [](auto& o) { o.query_count = 0; }), Catch::Contains("query_count"));
  CHECK_THAT(message(0, good, [](auto& o) { o.q = nullptr; }), Catch::Contains("NULL"));
  CHECK_THAT(message(0, good, [](auto& o) { o.output = nullptr; }), Catch::Contains("NULL"));
  CHECK_THAT(message(0, good, [](auto& o) { o.scale = NAN; }), Catch::Contains("finite"));
  CHECK_THAT(message(0, good, [](auto& o) { o.soft_cap = -1; }), Catch::Contains("negative"));
  CHECK_THAT(message(0, good, [](auto& o) { o.token_count = 301; }),
             Catch::Contains("tokens 0 to 301; the document has 300"));
  CHECK_THAT(message(0, good, [](auto& o) { o.first_token = UINT64_MAX; }),
             Catch::Contains("the document has 300"));
  CHECK_THAT(message(0, good,
                     [](auto& o) {
                       const int wild = 77;
                       std::memcpy(&o.query_dtype, &wild, sizeof wild);
                     }),
             Catch::Contains("dtype 77"));
  Question broken = good;
  broken.q[64 * broken.heads + 65] = NAN;
  CHECK_THAT(message(0, broken, as_it_is), Catch::Contains("query 1 of head 1 is nan in dim 1"));
  broken = good;
  for (float& value : broken.q) value = 3e38F;
  CHECK_THAT(message(0, broken, [](auto& o) { o.scale = 1; }), Catch::Contains("beyond fp32"));
  // Not minus infinity, not zeros, and nothing written.
  for (const float huge : {-3e38F, 3e38F}) {
    for (float& value : broken.q) value = huge;
    for (const float soft_cap : {0.0F, 30.0F}) {
      std::vector<float> output(2 * broken.heads * 64, 5);
      client::AttendOptions options = options_of(broken);
      options.scale = 1;
      options.soft_cap = soft_cap;
      options.output = output.data();
      const auto result = lease.attend(0, options);
      REQUIRE(!result.ok());
      CHECK_THAT(result.error().message, Catch::Contains("beyond fp32"));
      CHECK(output == std::vector<float>(output.size(), 5));
    }
  }
  // Sizes that overflow.
  for (const auto& [heads, rows] :
       {std::pair(1U << 31, 1U << 31), {1U << 31, 1U << 27}, {2U, ~0U}}) {
    client::AttendOptions options = options_of(good);
    float output = 0;
    options.output = &output;
    options.head_count = heads;
    options.query_count = rows;
    options.q_strides = {0, 0, 1};
    const auto result = lease.attend(0, options);
    REQUIRE(!result.ok());
    CHECK_THAT(result.error().message, Catch::Contains("rows; ask in parts"));
  }
  Question many = good;
  many.threads = ~0U;
  CHECK(message(0, many, as_it_is) == "");
  const std::vector<float> values(4, 1);
  for (const float bad : {NAN, INFINITY}) {
    const std::vector<float> sums = {0, bad};
    const polykv_attention_result result = {values.data(), sums.data()};
    std::vector<float> merged(4, 5);
    CHECK(polykv_attention_merge(&result, 1, 2, 2, POLYKV_F32, merged.data(), nullptr) ==
          POLYKV_ERR_INVALID_ARGUMENT);
    CHECK_THAT(polykv_last_error(), Catch::Contains("result 0") && Catch::Contains("row 1"));
    CHECK(merged == std::vector<float>(4, 5));
    CHECK(polykv_attention_merge(&result, 0, 2, 2, POLYKV_F32, merged.data(), nullptr) ==
          POLYKV_ERR_INVALID_ARGUMENT);
  }
  CHECK(polykv_layer_attend(nullptr, 0, nullptr) == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(polykv_attention_merge(nullptr, 1, 1, 1, POLYKV_F32, nullptr, nullptr) ==
        POLYKV_ERR_INVALID_ARGUMENT);
}
