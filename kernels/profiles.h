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
  uint32_t bits;  // 8: int8, uniform; 3 to 6: a level of codebook(bits)
  bool rotated;   // below 8 bits; see kernels/codebooks.h
};

struct ProfileRule {
  Profile profile;
  TensorRule k;
  TensorRule v;
};

inline constexpr ProfileRule kProfileRules[] = {
    {Profile::k8v8, {8, false}, {8, false}}, {Profile::k6v5, {6, true}, {5, true}},
    {Profile::k5v4, {5, true}, {4, true}},   {Profile::k8v3, {8, false}, {3, true}},
    {Profile::k4v3, {4, true}, {3, true}},
};

/// Null for profiles that are not of this kind.
constexpr const ProfileRule* profile_rule(Profile profile) {
  for (const ProfileRule& rule : kProfileRules) {
    if (rule.profile == profile) return &rule;
  }
  return nullptr;
}

}  // namespace polykv
