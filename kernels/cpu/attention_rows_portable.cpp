#include "kernels/cpu/attention_rows.h"

namespace polykv {

namespace {
#include "kernels/cpu/attention_rows.inl"
}  // namespace

const AttentionRows kAttentionRowsPortable = {"portable", softmax_block, scale,
                                              add_scaled, few_scores,    few_outputs};

}  // namespace polykv
