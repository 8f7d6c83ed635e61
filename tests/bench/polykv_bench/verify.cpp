#include "tests/bench/polykv_bench/verify.h"

#include <algorithm>
#include <cmath>

#include "kernels/segment.h"
#include "libclient/c_api.h"

namespace polykv::bench {

namespace {
constexpr uint64_t kSampleTokens = 1000;
}

DecodedRange reference_decode(const client::Lease& lease, const Shape& shape, uint32_t layer,
                              uint64_t first, uint64_t count) {
  const size_t token_values = size_t{shape.kv_heads} * shape.head_dim;
  DecodedRange range{first, count, std::vector<float>(count * token_values),
                     std::vector<float>(count * token_values)};
  const auto segments = lease.get()->lease->segments();
  for (const auto& segment : *segments) {
    const uint64_t low = std::max(first, segment->first_token);
    const uint64_t high = std::min(first + count, segment->first_token + segment->token_count);
    if (low >= high) continue;
    DecodeTarget target;
    target.first_token = low - segment->first_token;
    target.token_count = high - low;
    target.k = &range.k[(low - first) * token_values];
    target.v = &range.v[(low - first) * token_values];
    target.k_strides = {shape.head_dim, static_cast<int64_t>(token_values), 1};
    target.v_strides = target.k_strides;
    const Status status = decode_layer(segment->view, layer, target, Backend::reference);
    if (!status.is_ok()) throw std::runtime_error(status.message());
  }
  return range;
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(double{a[i]} - double{b[i]}, 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

std::vector<float> reference_attention(const DecodedRange& cache, const Shape& shape,
                                       uint32_t kv_head, const float* query) {
  const size_t dim = shape.head_dim;
  const auto row = [&](uint64_t token) { return (token * shape.kv_heads + kv_head) * dim; };
  std::vector<double> logits(cache.count);
  for (uint64_t token = 0; token < cache.count; ++token) {
    double sum = 0;
    for (size_t i = 0; i < dim; ++i) sum += double{query[i]} * double{cache.k[row(token) + i]};
    logits[token] = sum / std::sqrt(static_cast<double>(dim));
  }
  const double most = *std::max_element(logits.begin(), logits.end());
  std::vector<double> sums(dim);
  double weights = 0;
  for (uint64_t token = 0; token < cache.count; ++token) {
    const double weight = std::exp(logits[token] - most);
    weights += weight;
    for (size_t i = 0; i < dim; ++i) sums[i] += weight * double{cache.v[row(token) + i]};
  }
  std::vector<float> output;
  for (const double sum : sums) output.push_back(static_cast<float>(sum / weights));
  return output;
}

std::vector<Sample> samples_of(const Shape& shape) {
  const uint64_t count = std::min(kSampleTokens, shape.tokens);
  return {{0, 0, count}, {shape.layers - 1, shape.tokens - count, count}};
}

}  // namespace polykv::bench
