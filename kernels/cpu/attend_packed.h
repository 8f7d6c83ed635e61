// Attention to the quantised profiles' blocks as they are, without decoding them.
#pragma once

#include "kernels/attend.h"

namespace polykv::cpu {

/// The way to attend to this layer's blocks: null for what is no quantised profile, has dims that
/// do not suit, or is as fast decoded on this machine.
const AttendOps* packed_ops_for(const LayerView& layer);

/// As attend_tokens, by `ops`.
[[nodiscard]] bool attend_packed(const AttendOps& ops, const LayerView& layer, uint32_t kv_head,
                                 uint64_t document_token, uint64_t first_token,
                                 uint64_t token_count, const AttendQueries& queries,
                                 AttendPart& part, AttendScratch& scratch);

}  // namespace polykv::cpu
