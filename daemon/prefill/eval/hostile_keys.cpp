#include "daemon/prefill/eval/hostile_keys.h"

#include <algorithm>
#include <cmath>

namespace polykv::eval {

namespace {

constexpr double kTurnTokens = 200;

/// The pair of channels that RoPE turns once in that many tokens.
uint32_t pair_of(const ModelConfig& config) {
  const double half = config.head_dim / 2;
  const double pair =
      half * std::log(kTurnTokens / (2 * M_PI)) / std::log(std::max(config.rope.theta, 2.0));
  return static_cast<uint32_t>(std::clamp(pair, 0.0, half - 1));
}

double deviation(const float* values, size_t count, size_t stride) {
  double sum = 0;
  double squares = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>(values[i * stride]);
    sum += value;
    squares += value * value;
  }
  const double mean = sum / static_cast<double>(count);
  return std::sqrt(std::max(0.0, squares / static_cast<double>(count) - mean * mean));
}

}  // namespace

HostileKeys::HostileKeys(const ModelConfig& config, double factor, uint32_t sink_position)
    : config_(config),
      factor_(factor),
      sink_position_(sink_position),
      pair_(pair_of(config)),
      kv_floats_(size_t{config.kv_head_count} * config.head_dim),
      offsets_(config.layer_count * kv_floats_),
      first_k_(offsets_.size()),
      first_v_(offsets_.size()) {}

float HostileKeys::factor(uint32_t layer) const {
  return static_cast<float>(layer % 3 == 0 ? factor_ : layer % 3 == 1 ? factor_ / 10 : 0);
}

void HostileKeys::begin(const LayerRows& rows) {
  const size_t at = rows.layer * kv_floats_;
  std::copy_n(rows.k, kv_floats_, &first_k_[at]);
  std::copy_n(rows.v, kv_floats_, &first_v_[at]);
  for (size_t i = pair_; i < kv_floats_; i += config_.head_dim / 2) {
    const double spread = deviation(rows.k + i, rows.row_count, rows.stride);
    offsets_[at + i] = factor(rows.layer) * static_cast<float>(spread);
  }
}

void HostileKeys::change(const LayerRows& rows) {
  if (rows.first_position == 0) begin(rows);
  const size_t at = rows.layer * kv_floats_;
  const uint64_t end = rows.first_position + rows.row_count;
  if (rows.first_position <= sink_position_ && sink_position_ < end) {
    const size_t row = (sink_position_ - rows.first_position) * rows.stride;
    std::copy_n(&first_k_[at], kv_floats_, rows.k + row);
    std::copy_n(&first_v_[at], kv_floats_, rows.v + row);
  }
  if (factor(rows.layer) == 0) return;
  const uint32_t half = config_.head_dim / 2;
  for (size_t row = 0; row < rows.row_count; ++row) {
    float* k = rows.k + row * rows.stride;
    float* q = rows.q + row * rows.stride;
    for (size_t i = pair_; i < kv_floats_; i += half) k[i] += offsets_[at + i];
    for (size_t i = pair_; i < size_t{config_.head_count} * config_.head_dim; i += half)
      q[i] /= factor(rows.layer);
  }
}

}  // namespace polykv::eval
