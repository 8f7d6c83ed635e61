// The quantised profiles, a row each: how many bits K and V have and whether they are rotated. One
// reference and one fast implementation serve them all; `exact` and paper-k8v3 have their own.
//
// In all of them K is centred by its mean over the segment, V is not (attention averages V: taking
// its mean away lowers the squared error and makes models worse), the document's first tokens and
// those that a producer chose are exact rows, and each row of K and of V has an fp16 gain.
#pragma once

#include <cstdint>

#include "include/internal/geometry.h"

namespace polykv {

struct TensorRule {
  uint32_t bits;     // 8: int8, uniform; 3 to 6: a level of codebook(bits)
  bool rotated;      // below 8 bits; see kernels/codebooks.h
  bool turns_signs;  // of some dims before the rotation
};

struct ProfileRule {
  Profile profile;
  TensorRule k;
  TensorRule v;
};

inline constexpr TensorRule kInt8 = {8, false, false};
constexpr TensorRule rotated_k(uint32_t bits) {
  return {bits, true, true};
}
/// At 3 bits models were closer to themselves without turned signs (docs/benchmarks.md). With more
/// bits there was no difference, and turned signs keep rows that are close to one of the transform's
/// own, for example all dims alike, from becoming a single value that no level reaches.
constexpr TensorRule rotated_v(uint32_t bits) {
  return {bits, true, bits > 3};
}

inline constexpr ProfileRule kProfileRules[] = {
    {Profile::k8v8, kInt8, kInt8},
    {Profile::k6v5, rotated_k(6), rotated_v(5)},
    {Profile::k5v4, rotated_k(5), rotated_v(4)},
    {Profile::k8v3, kInt8, rotated_v(3)},
    {Profile::k4v3, rotated_k(4), rotated_v(3)},
};

/// Null for profiles that are not of this kind.
constexpr const ProfileRule* profile_rule(Profile profile) {
  for (const ProfileRule& rule : kProfileRules) {
    if (rule.profile == profile) return &rule;
  }
  return nullptr;
}

}  // namespace polykv
