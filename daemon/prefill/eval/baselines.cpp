#include "daemon/prefill/eval/baselines.h"

#include <algorithm>
#include <cmath>

#include "kernels/half.h"

namespace polykv::eval {

namespace {

constexpr Baseline kBaselines[] = {{"q8_0", 8.5, 128}, {"q5_0", 5.5, 16}, {"q4_0", 4.5, 8}};

/// The value of largest magnitude, with its sign.
float extreme(const float* values) {
  return *std::max_element(values, values + kBaselineBlock,
                           [](float a, float b) { return std::abs(a) < std::abs(b); });
}

}  // namespace

std::optional<Baseline> baseline_from_name(std::string_view name) {
  for (const Baseline& baseline : kBaselines) {
    if (name == baseline.name) return baseline;
  }
  return std::nullopt;
}

void pass_through(const Baseline& baseline, const float* source, float* target, uint32_t count) {
  const auto levels = static_cast<float>(baseline.levels);
  for (uint32_t start = 0; start < count; start += kBaselineBlock) {
    const float* values = source + start;
    // q8_0 maps the largest magnitude to 127; the others map the extreme to the one code that has no
    // counterpart of the other sign, so their scale may be negative.
    const bool is_8_bit = baseline.levels == 128;
    const float scale = is_8_bit ? std::abs(extreme(values)) / 127.0F : extreme(values) / -levels;
    const float inverse = scale == 0 ? 0 : 1 / scale;
    const float stored = f32_from_f16(f16_from_f32(scale));
    for (uint32_t i = 0; i < kBaselineBlock; ++i) {
      const float code =
          is_8_bit
              ? std::round(values[i] * inverse)
              : std::min(std::trunc(values[i] * inverse + levels + 0.5F), 2 * levels - 1) - levels;
      target[start + i] = code * stored;
    }
  }
}

}  // namespace polykv::eval
