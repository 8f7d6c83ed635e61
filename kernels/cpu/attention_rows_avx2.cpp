#include "kernels/cpu/attention_rows.h"

namespace polykv {

namespace {
#include "kernels/cpu/attention_rows.inl"
}  // namespace

const AttentionRows kAttentionRowsAvx2 = {"avx2",     softmax_block, scale,
                                          add_scaled, few_scores,    few_outputs};

}  // namespace polykv
