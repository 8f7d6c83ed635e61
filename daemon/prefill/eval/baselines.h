// q8_0, q5_0 and q4_0, the block formats in which llama.cpp keeps a quantised cache: blocks of 32
// values with one fp16 scale, symmetric around zero. Here for comparison only, as values that went
// through them; nothing is stored.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace polykv::eval {

struct Baseline {
  const char* name;
  double bits_per_value;  // codes and scales
  int levels;             // codes of a block: -levels to levels - 1
};
std::optional<Baseline> baseline_from_name(std::string_view name);

inline constexpr uint32_t kBaselineBlock = 32;

/// `count` values, a multiple of kBaselineBlock, become what a reader would get.
void pass_through(const Baseline& baseline, const float* source, float* target, uint32_t count);

}  // namespace polykv::eval
