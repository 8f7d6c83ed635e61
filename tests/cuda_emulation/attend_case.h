// A document, queries of it and what attention has to make of them: for the tests of attention's kernels. Uses Catch2's REQUIRE.
#pragma once

#include <catch2/catch.hpp>
#include <random>

#include "tests/cuda_emulation/device_calls.h"
#include "tests/support/attention_oracle.h"
#include "tests/support/require_ok.h"
#include "tests/support/segments.h"

namespace polykv::test {

/// A segment and what it decodes to.
struct Document {
  Document(const LayerValues& values, Profile profile, uint64_t first_token = 0,
           std::vector<uint32_t> chosen = {}, Dtype source_dtype = Dtype::f32)
      : first_token(first_token), bytes(build(values, profile, chosen, source_dtype)) {
    decoded = decode_all(open_segment(bytes), 0, Backend::reference);
  }
  AlignedBytes build(const LayerValues& values, Profile profile,
                     const std::vector<uint32_t>& chosen, Dtype source_dtype) const {
    SegmentOptions options;
    options.first_token = first_token;
    options.chosen = chosen;
    options.chosen_exact_rows = static_cast<uint32_t>(chosen.size());
    return build_segment(test_spec(test_model({values.geometry}, source_dtype), profile,
                                   values.token_count, options),
                         {values}, options);
  }
  LayerView layer() const { return open_segment(bytes).layer(0); }
  cuda::AttendRun run() const { return {layer(), first_token, 0, decoded.token_count}; }

  uint64_t first_token;
  AlignedBytes bytes;
  LayerValues decoded;
};

/// Queries of `length` times 1 / the longest key: |q| |k| is at most that, so logits are within it.
inline std::vector<float> random_queries(const LayerValues& keys, uint32_t rows, double length,
                                         uint32_t seed) {
  const uint32_t dim = keys.geometry.k_head_dim;
  double longest = 1e-30;
  for (size_t i = 0; i < keys.k.size(); i += dim)
    longest = std::max(longest, norm(&keys.k[i], dim));
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(size_t{rows} * dim);
  for (float& value : q) value = normal(engine);
  for (size_t i = 0; i < q.size(); i += dim) {
    const auto factor = static_cast<float>(length / longest / norm(&q[i], dim));
    for (uint32_t j = 0; j < dim; ++j) q[i + j] *= factor;
  }
  return q;
}

struct Answer {
  std::vector<float> output;       // [query, head, v_head_dim]
  std::vector<float> log_sum_exp;  // [query, head]
};

inline cuda::AttendCall dense_call(const std::vector<cuda::AttendRun>& runs, uint32_t group,
                                   uint32_t query_count, const std::vector<float>& q,
                                   Answer& answer) {
  const LayerGeometry& geometry = runs[0].layer.geometry;
  cuda::AttendCall call;
  call.runs = runs;
  call.query_count = query_count;
  call.head_count = group * geometry.kv_head_count;
  call.q = q.data();
  call.q_strides = {geometry.k_head_dim, int64_t{query_count} * geometry.k_head_dim, 1};
  const size_t rows = size_t{query_count} * call.head_count;
  answer.output.assign(rows * geometry.v_head_dim, -99.0F);
  answer.log_sum_exp.assign(rows, -99.0F);
  call.output = answer.output.data();
  call.output_strides = {int64_t{call.head_count} * geometry.v_head_dim, geometry.v_head_dim, 1};
  call.log_sum_exp = answer.log_sum_exp.data();
  return call;
}

inline void run(const cuda::AttendCall& call, uint32_t multiprocessors, const Schedule& schedule) {
  const Status status = device_attend(call, multiprocessors, schedule);
  INFO(status.message());
  REQUIRE_OK(status);
}

/// Of rows [head, query] with the logits' scale and first tokens of the call, which are the document's.
inline void check(const cuda::AttendCall& call, const Document& document, const Answer& answer) {
  const LayerGeometry& geometry = document.decoded.geometry;
  const auto* q = static_cast<const float*>(call.q);
  const cuda::AttendRun& run = call.runs[0];
  float largest_v = 0;
  for (const float value : document.decoded.v) largest_v = std::max(largest_v, std::abs(value));
  const uint32_t group = call.head_count / geometry.kv_head_count;
  for (uint32_t head = 0; head < call.head_count; ++head) {
    for (uint32_t query = 0; query < call.query_count; ++query) {
      const float* row = q + (size_t{head} * call.query_count + query) * geometry.k_head_dim;
      uint64_t first = run.first_token;
      const uint64_t end = run.first_token + run.token_count;
      if (call.query_first_tokens != nullptr) {
        const uint64_t from = call.query_first_tokens[query];
        first = std::max(first, from < run.document_token ? 0 : from - run.document_token);
        first = std::min(first, end);
      }
      std::vector<double> want;
      const double want_sum =
          plain_attention(document.decoded, head / group, row, first, end, call.soft_cap, want);
      const size_t at = size_t{query} * call.head_count + head;
      const double tolerance = logit_tolerance(run.layer, document.decoded, head / group, row);
      INFO("head " << head << " query " << query);
      if (std::isinf(want_sum)) {
        REQUIRE(answer.log_sum_exp[at] == want_sum);
      } else {
        REQUIRE(std::abs(answer.log_sum_exp[at] - want_sum) <= tolerance);
      }
      double worst = 0;
      for (uint32_t i = 0; i < geometry.v_head_dim; ++i) {
        const double difference = std::abs(answer.output[at * geometry.v_head_dim + i] - want[i]);
        worst = difference <= worst ? worst : difference;  // NaN is worst
      }
      REQUIRE(worst <= (2 * tolerance + 6e-5) * largest_v);
    }
  }
}

}  // namespace polykv::test
