// Attention of a few query rows to one packed block, once per instruction set; what is around it is in
// kernels/cpu/attend_packed.cpp.
//
// Codes are looked up as bytes and multiplied as integers: queries, and softmax weights times the
// values' gains, are fixed-point numbers, products are summed exactly in 32 bits, and a key's gain
// is applied once. Outputs are sums in the values' rotated frame, before the layer's power of two.
#pragma once

#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/cpu/attention_rows.h"

namespace polykv::cpu {

/// Rows that share the unpacking of a block.
inline constexpr uint32_t kPackedRows = 4;

/// A query row, rotated as the keys are.
struct PackedQuery {
  const int32_t* words = nullptr;  // k_head_dim / 2, from pack_query
  float scale = 0;       // an integer product times this and the token's fp16 gain is the logit
  int32_t bias = 0;      // to be taken from the products
  float mean_logit = 0;  // of the mean that was taken from the keys
  uint64_t unseen = 0;   // bit t: token t of the block is not for this row
  SoftmaxState* state = nullptr;
  float* output = nullptr;  // [v_head_dim]
};

/// What to fetch from memory meanwhile: `lines` cache lines forwards from each of kAheadStreams places, in turns. Of one
/// stream of addresses no processor fetches as fast as it can.
inline constexpr uint32_t kAheadStreams = 4;
inline constexpr uint32_t kLineBytes = 64;
struct Ahead {
  uintptr_t first = 0;  // of anything or nothing: it is only a hint
  uint64_t apart_bytes = 0;
  uint32_t lines = 0;
};

struct PackedBlock {
  TensorPart k;
  TensorPart v;
  float soft_cap;  // 0: none
  const uint8_t* bytes;
  Ahead ahead;
};

struct AttendOps {
  const char* name;
  uint32_t v_dim_multiple;  // v_head_dim is one
  /// Fills words, scale and bias of `query`. row: k_head_dim values, the largest of which is zero
  /// or of a size near 1.
  void (*pack_query)(const float* row, uint32_t k_head_dim, int32_t* words, PackedQuery* query);
  /// row_count: 1 to kPackedRows. False: a logit is beyond fp32, or a gain is what no encoder
  /// writes; states and outputs are of no use then.
  bool (*attend_block)(const PackedBlock& block, const PackedQuery* rows, uint32_t row_count);
};

/// Null where this machine, or POLYKV_CPU, has no path that is faster than decoding. Decided once.
const AttendOps* attend_ops();
/// Null where the compiler's target or this machine has no AVX2, or no AVX-512 with VBMI and VNNI.
const AttendOps* avx2_attend_ops();
const AttendOps* avx512_attend_ops();

}  // namespace polykv::cpu
