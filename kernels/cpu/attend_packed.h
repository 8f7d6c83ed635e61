// Attention to the quantised profiles' blocks as they are, without decoding them.
#pragma once

#include "kernels/attend.h"

namespace polykv::cpu {

/// Whether attend_packed can do it: a quantised profile, dims that suit, and a machine that is
/// faster this way.
bool can_attend_packed(const LayerView& layer);

/// As attend_tokens.
[[nodiscard]] bool attend_packed(const LayerView& layer, uint32_t kv_head, uint64_t document_token,
                                 uint64_t first_token, uint64_t token_count,
                                 const AttendQueries& queries, AttendPart& part,
                                 AttendScratch& scratch);

}  // namespace polykv::cpu
