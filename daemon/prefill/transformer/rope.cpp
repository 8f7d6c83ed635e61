#include "daemon/prefill/transformer/rope.h"

#include <cmath>

namespace polykv {

std::vector<float> rope_frequencies(const ModelConfig& config) {
  std::vector<float> frequencies(config.head_dim / 2);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const auto exponent = static_cast<float>(2 * i) / static_cast<float>(config.head_dim);
    frequencies[i] =
        1.0F / static_cast<float>(std::pow(config.rope.theta, static_cast<double>(exponent)));
    if (config.rope.scaling == RopeScaling::linear)
      frequencies[i] /= static_cast<float>(config.rope.scaling_factor);
  }
  return frequencies;
}

void rope_angles(const std::vector<float>& frequencies, size_t first_position, size_t row_count,
                 float* cosine, float* sine) {
  const size_t half = frequencies.size();
  for (size_t row = 0; row < row_count; ++row) {
    for (size_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(first_position + row) * frequencies[i];
      cosine[row * half + i] = std::cos(angle);
      sine[row * half + i] = std::sin(angle);
    }
  }
}

}  // namespace polykv
