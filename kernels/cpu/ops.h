// The inner loops of the CPU path, once per instruction set; everything around them is in the
// codecs' own files.
//
// Rows are fp32, `stride` floats apart, one row a token; dim counts are head_dims. Code layouts:
// kernels/block_layout.h. No function checks its arguments, allocates or keeps state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/profiles.h"

namespace polykv::cpu {

struct Rows {
  const float* data;
  int64_t stride;
  uint32_t count;  // at most 64
  uint32_t dims;
};

/// Codes of K or V in one block, and what makes values of them.
struct BlockCodes {
  TensorRule rule;
  bool is_k;
  const uint8_t* codes;
  uint32_t dims;
  const float* gains;  // [64]
  const float* means;  // [dims] or null
  /// Codes that are read next, fetched a row at a time in between; only a hint, of any memory.
  const uint8_t* next;
};

// What decode_block takes: dims that are a multiple of 16, transforms of at most 256, and gains,
// fp16 times a power of two, of which a 2^28th is an ordinary float.
inline constexpr uint32_t kFusedDimsStep = 16;
inline constexpr uint32_t kMostFusedDims = 511;  // if rotated
inline constexpr int32_t kLeastFusedExponent = -74;

/// Where rows [low, high) of a block go; neighbouring dims, `stride` elements from row to row.
struct RowsTarget {
  void* data;  // of row `low`
  int64_t stride;
  Dtype dtype;
  bool streams;  // past the caches; rows begin and end at cache lines then
  uint32_t low;
  uint32_t high;
};

/// A gain below zero leaves its token's slot as it is.
struct Ops {
  const char* name;

  void (*f32_from_f16)(const uint16_t* source, float* target, size_t count);
  void (*f32_from_bf16)(const uint16_t* source, float* target, size_t count);
  void (*f16_from_f32)(const float* source, uint16_t* target, size_t count);
  void (*bf16_from_f32)(const float* source, uint16_t* target, size_t count);

  /// The largest |value - mean|; an infinity or NaN among the values gives one. `means` may be
  /// null.
  void (*max_abs)(const Rows& rows, const float* means, float* largest);
  /// sums[dim] += each row's value.
  void (*add_rows)(const Rows& rows, double* sums);
  void (*norms)(const Rows& rows, double* norms);

  /// code = round((value - mean) / gain), within +-127; a gain of zero gives code 0. `means` may be
  /// null.
  void (*k8_pack)(const Rows& rows, const float* means, const float* gains, uint8_t* codes);
  void (*v8_pack)(const Rows& rows, const float* gains, uint8_t* codes);
  /// Divides by `divisors`, rotates, takes the nearest codebook entry. dims: a power of two >= 8.
  void (*v3_pack)(const Rows& rows, const float* divisors, uint8_t* codes);

  /// All 64 tokens of a block. `means` may be null.
  void (*k8_unpack)(const uint8_t* codes, uint32_t dims, const float* gains, const float* means,
                    float* rows, int64_t stride);
  void (*v8_unpack)(const uint8_t* codes, uint32_t dims, const float* gains, float* rows,
                    int64_t stride);
  /// norms / dims * (the rotated codebook entries).
  void (*v3_unpack)(const uint8_t* codes, uint32_t dims, const float* norms, float* rows,
                    int64_t stride);

  // Rows of 3 to 6 bits, whose dims are a multiple of 16. In between they are a byte a code,
  // [64 tokens, dims].

  /// Centres (`means` may be null), rotates, chooses codes and gains. Tokens without a row, and
  /// those whose gain was below zero, get codes of 0.
  void (*rotated_encode)(const Rows& rows, const float* means, const TensorRule& rule,
                         uint8_t* codes, double* gains);
  void (*rotated_decode)(const uint8_t* codes, uint32_t dims, const TensorRule& rule,
                         const float* gains, const float* means, float* rows, int64_t stride);
  /// One row in place, whose dims are a multiple of 16: what an encoder does to it, and back.
  void (*rotate)(float* row, uint32_t dims, const TensorRule& rule);
  void (*rotate_back)(float* row, uint32_t dims, const TensorRule& rule);
  /// K of 4 to 6 bits, V of 3 to 5.
  void (*k_pack)(const uint8_t* codes, uint32_t dims, uint32_t bits, uint8_t* pieces);
  void (*k_unpack)(const uint8_t* pieces, uint32_t dims, uint32_t bits, uint8_t* codes);
  void (*v_pack)(const uint8_t* codes, uint32_t dims, uint32_t bits, uint8_t* planes);
  void (*v_unpack)(const uint8_t* planes, uint32_t dims, uint32_t bits, uint8_t* codes);

  /// All of a block's decoding at once. Null: this instruction set has only the steps above.
  void (*decode_block)(const BlockCodes& block, const RowsTarget& target);
};

/// The widest that this machine runs. POLYKV_CPU=avx2 keeps to that, POLYKV_CPU=baseline to what
/// every x86-64 (or other machine) has.
const Ops& ops();
const Ops& baseline_ops();
/// Null where the compiler's target or this machine has no AVX2, or no AVX-512 with VBMI.
const Ops* avx2_ops();
const Ops* avx512_ops();

}  // namespace polykv::cpu
