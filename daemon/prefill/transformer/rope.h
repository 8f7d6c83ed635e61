// RoPE's angles, in fp32 step by step, as the models were trained and as everybody computes them: at position 8,000 the
// rounding of the inverse frequency turns an angle by up to 5e-4. Both forward passes take them from here.
#pragma once

#include <cstddef>
#include <vector>

#include "daemon/prefill/model/model_config.h"

namespace polykv {

/// [head_dim / 2]: the angle from one position to the next.
std::vector<float> rope_frequencies(const ModelConfig& config);

/// cosine, sine: [row, head_dim / 2], of the positions from first_position on.
void rope_angles(const std::vector<float>& frequencies, size_t first_position, size_t row_count,
                 float* cosine, float* sine);

}  // namespace polykv
