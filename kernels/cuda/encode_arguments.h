// What the kernels that encode a layer share. They run one after the other on a stream:
//
//   scan     a thread block for each block of 64 tokens and kv_head, of K and of V: values that do not fit,
//            K's sums of each dim (f64, tokens in order)
//   means    a thread block a kv_head: K's means
//   rows     as scan: codes and gains of rotated rows, the largest value of int8 rows
//            paper-k8v3's V has its norms for gains
//   scales   two thread blocks: the layer's exponents of K's and of V's gains and exact rows, and the outcome
//   finish   as scan, and one a kv_head for the exact rows: gains, codes of int8 rows
//
// Workspace, in this order:  sums     f64 [kv_head, block, k_head_dim]
//                            numbers  f32 [tensor, kv_head, block, 64]   gains, or the largest value of int8 rows
//                            most     f32 [tensor, kv_head, block]       the largest of those
//                            bad      BadValue [tensor, kv_head, block]
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_arguments.h"
#include "kernels/cuda/encode_call.h"
#include "kernels/cuda/tensor_arguments.h"
#include "kernels/cuda/thread.h"

namespace polykv::cuda {

inline constexpr uint32_t kEncodeThreads = 256;
inline constexpr uint32_t kEncodeWarps = kEncodeThreads / kWarpThreads;

struct BadValue {
  uint32_t token;  // kNoBadToken: none
  float value;
};

/// K or V on its way in.
struct SourceTensor {
  const void* data;  // [token, kv_head, head_dim] under strides
  Strides strides;
  uint32_t head_dim;
  uint32_t bits;
  bool is_k;
  bool is_rotated;
  bool is_paper;   // one scale for all of K, or V divided by its norms
  uint32_t gains;  // offsets in a block; kNoGains
  uint32_t codes;
  uint16_t* exact_rows;  // [kv_head, capacity, head_dim]
  float* means;          // [kv_head, head_dim]; null: not centred
  TurnedSigns signs;
};

struct EncodeArguments {
  SourceTensor tensors[2];  // K, V
  Dtype dtype;              // of the source
  Dtype stored_dtype;       // of `exact`
  uint8_t* blocks;
  uint64_t block_bytes;
  uint32_t block_count;  // of a kv_head
  uint32_t kv_head_count;
  uint64_t token_count;
  const uint32_t* exact_tokens;
  uint32_t exact_count;
  uint32_t exact_capacity;
  double* sums;
  float* numbers;
  float* most;
  BadValue* bad;
  EncodeOutcome* outcome;

  /// The source's value, not centred.
  POLYKV_HOST_DEVICE float at(const SourceTensor& tensor, uint32_t kv_head, uint64_t token,
                              uint32_t dim) const {
    return load_element(tensor.data, dtype,
                        tensor.strides.head * kv_head +
                            tensor.strides.token * static_cast<int64_t>(token) +
                            tensor.strides.dim * dim);
  }
  POLYKV_HOST_DEVICE float centred(const SourceTensor& tensor, uint32_t kv_head, uint64_t token,
                                   uint32_t dim) const {
    const float value = at(tensor, kv_head, token, dim);
    return tensor.means == nullptr
               ? value
               : value - tensor.means[uint64_t{kv_head} * tensor.head_dim + dim];
  }
};

/// A thread block's share: 64 tokens of one kv_head of K or V.
struct EncodeBlock {
  uint32_t tensor;
  uint32_t kv_head;
  uint32_t block;
  uint64_t place;  // in [tensor, kv_head, block]
  uint64_t first_token;
  uint32_t token_count;
  uint64_t exact;  // a bit for each token that is an exact row

  POLYKV_HOST_DEVICE static EncodeBlock of(const EncodeArguments& a, uint64_t index) {
    EncodeBlock result{};
    result.place = index;
    result.block = static_cast<uint32_t>(index % a.block_count);
    result.kv_head = static_cast<uint32_t>(index / a.block_count % a.kv_head_count);
    result.tensor = static_cast<uint32_t>(index / a.block_count / a.kv_head_count);
    result.first_token = uint64_t{result.block} * kBlockTokens;
    const uint64_t left = a.token_count - result.first_token;
    result.token_count = static_cast<uint32_t>(left < kBlockTokens ? left : kBlockTokens);
    const uint64_t end = result.first_token + kBlockTokens;
    for (uint32_t i = lower_bound(a.exact_tokens, a.exact_count, result.first_token);
         i < a.exact_count && a.exact_tokens[i] < end; ++i)
      result.exact |= uint64_t{1} << (a.exact_tokens[i] - result.first_token);
    return result;
  }
  POLYKV_HOST_DEVICE bool is_coded(uint32_t slot) const {
    return slot < token_count && (exact >> slot & 1U) == 0;
  }
  POLYKV_HOST_DEVICE uint8_t* bytes(const EncodeArguments& a) const {
    return a.blocks + (uint64_t{kv_head} * a.block_count + block) * a.block_bytes;
  }
};

}  // namespace polykv::cuda
