#include "daemon/prefill/transformer/last_queries.h"

#include <algorithm>
#include <cmath>

namespace polykv {

LastQueries::LastQueries(const ModelConfig& config)
    : head_count_(config.head_count),
      head_dim_(config.head_dim),
      kept_(config.layer_count),
      q_(size_bytes(config) / sizeof(float)) {}

uint64_t LastQueries::size_bytes(const ModelConfig& config) {
  return sizeof(float) * config.layer_count * kCertificateQueries * config.head_count *
         config.head_dim;
}

void LastQueries::keep(const LayerRows& rows) {
  Kept& kept = kept_[rows.layer];
  const size_t row_floats = size_t{head_count_} * head_dim_;
  float* own = &q_[rows.layer * kCertificateQueries * row_floats];
  if (kept.end != rows.first_position) kept.count = 0;
  const auto added = static_cast<uint32_t>(std::min<size_t>(rows.row_count, kCertificateQueries));
  const uint32_t dropped = std::max(kept.count + added, kCertificateQueries) - kCertificateQueries;
  std::copy(own + dropped * row_floats, own + kept.count * row_floats, own);
  kept.count -= dropped;
  for (uint32_t i = 0; i < added; ++i) {
    const float* row = rows.q + (rows.row_count - added + i) * rows.stride;
    std::copy(row, row + row_floats, own + (kept.count + i) * row_floats);
  }
  kept.count += added;
  kept.end = rows.first_position + rows.row_count;
}

LayerQueries LastQueries::of(uint32_t layer, uint64_t first_token) const {
  const Kept& kept = kept_[layer];
  const size_t row_floats = size_t{head_count_} * head_dim_;
  LayerQueries queries;
  queries.head_count = head_count_;
  queries.row_count = static_cast<uint32_t>(
      std::min<uint64_t>(kept.count, kept.end > first_token ? kept.end - first_token : 0));
  queries.q = &q_[(layer * kCertificateQueries + kept.count - queries.row_count) * row_floats];
  queries.strides = {head_dim_, static_cast<int64_t>(row_floats), 1};
  queries.scale = 1.0F / std::sqrt(static_cast<float>(head_dim_));
  return queries;
}

}  // namespace polykv
