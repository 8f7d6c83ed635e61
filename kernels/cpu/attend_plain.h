// Attention to keys and values in fp32.
#pragma once

#include <span>

#include "kernels/attend.h"

namespace polykv::cpu {

/// Takes `count` tokens into `part`: scratch.k [token, k_head_dim], scratch.v [token, v_head_dim].
/// `q`: the rows of a kv_head, [head of the group, row]. skipped[row]: how many of the tokens come
/// before those that a row sees. False: a logit is beyond fp32.
[[nodiscard]] bool attend_plain(const float* q, const LayerGeometry& geometry, size_t count,
                                const AttendQueries& queries, std::span<const size_t> skipped,
                                AttendPart& part, AttendScratch& scratch);

/// Takes what other tokens gave a row into its state and output of `dims` values.
void take_in(const SoftmaxState& other, const float* other_output, uint32_t dims,
             SoftmaxState& state, float* output);

bool all_finite(const float* values, size_t count);

}  // namespace polykv::cpu
