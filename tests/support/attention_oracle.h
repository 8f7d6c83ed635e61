// Attention in double precision over what a layer decodes to, and how far a path that reads codes may be from it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/support/relative_error.h"
#include "tests/support/segments.h"

namespace polykv::test {

inline double norm(const float* row, uint32_t dim, const float* minus = nullptr) {
  double sum = 0;
  for (uint32_t i = 0; i < dim; ++i)
    sum += square(double{row[i]} - (minus == nullptr ? 0.0 : double{minus[i]}));
  return std::sqrt(sum);
}

/// One row in double precision over the decoded layer; gives the log-sum-exp.
inline double plain_attention(const LayerValues& decoded, uint32_t kv_head, const float* q,
                              uint64_t first, uint64_t end, float soft_cap,
                              std::vector<double>& output) {
  const LayerGeometry& geometry = decoded.geometry;
  std::vector<double> logits;
  for (uint64_t token = first; token < end; ++token) {
    const float* k = &decoded.k[(kv_head * decoded.token_count + token) * geometry.k_head_dim];
    double logit = 0;
    for (uint32_t i = 0; i < geometry.k_head_dim; ++i) logit += double{q[i]} * double{k[i]};
    logits.push_back(soft_cap > 0 ? soft_cap * std::tanh(logit / soft_cap) : logit);
  }
  output.assign(geometry.v_head_dim, 0.0);
  if (logits.empty()) return -INFINITY;
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float* v = &decoded.v[(kv_head * decoded.token_count + first + i) * geometry.v_head_dim];
    const double weight = std::exp(logits[i] - most);
    for (uint32_t d = 0; d < geometry.v_head_dim; ++d) output[d] += weight * double{v[d]};
    sum += weight;
  }
  for (double& value : output) value /= sum;
  return most + std::log(sum);
}

/// How far a logit may be off: queries of 15 bits against what is left of a key beside its mean,
/// fp32 for the rest.
inline double logit_tolerance(const LayerView& layer, const LayerValues& decoded, uint32_t kv_head,
                              const float* q) {
  const uint32_t dim = decoded.geometry.k_head_dim;
  double centred = 0;
  double whole = 0;
  for (uint64_t token = 0; token < decoded.token_count; ++token) {
    const float* k = &decoded.k[(kv_head * decoded.token_count + token) * dim];
    const float* means = layer.k_means == nullptr ? nullptr : layer.k_means + size_t{kv_head} * dim;
    centred = std::max(centred, norm(k, dim, means));
    whole = std::max(whole, norm(k, dim));
  }
  return norm(q, dim) * (4e-5 * centred + 2e-6 * whole) + 5e-6;
}

}  // namespace polykv::test
