// Strided tensors as rows of fp32 and back, a block of at most 64 tokens of one kv_head at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/codec.h"
#include "kernels/cpu/ops.h"
#include "kernels/reference/elements.h"

namespace polykv::cpu {

using reference::source_k;
using reference::source_v;
using reference::SourceTensor;
using reference::target_k;
using reference::target_v;
using reference::TargetTensor;

/// `count` neighbouring elements to fp32 and back.
void load_row(Dtype dtype, const void* row, float* out, uint32_t count);
void store_row(Dtype dtype, const float* row, void* out, uint32_t count);

/// Reads blocks of a source. Rows stay valid until the next read; fp32 with neighbouring dims is
/// read in place.
class BlockReader {
 public:
  explicit BlockReader(const SourceTensor& source)
      : source_(source), scratch_(size_t{kBlockTokens} * source.head_dim) {}
  Rows read(uint32_t head, uint64_t first_token, uint32_t count);
  /// What is read after the next read, which fetches it from memory in between: where kv_heads are
  /// side by side, a block's rows are too far apart for the machine to see that by itself.
  void expect(uint32_t head, uint64_t first_token) { expected_ = element(head, first_token, 0); }

 private:
  const uint8_t* element(uint32_t head, uint64_t token, uint32_t dim) const {
    return static_cast<const uint8_t*>(source_.data) +
           reference::element_index(source_.strides, head, token, dim) *
               static_cast<int64_t>(dtype_size_bytes(source_.dtype));
  }

  SourceTensor source_;
  const uint8_t* expected_ = nullptr;
  std::vector<float> scratch_;
};

/// Writes blocks of a target, whose tokens are [first, first + count) of the segment.
class BlockWriter {
 public:
  BlockWriter(const TargetTensor& target, uint64_t first_token, uint64_t token_count)
      : target_(target),
        first_token_(first_token),
        token_count_(token_count),
        scratch_(size_t{kBlockTokens} * target.head_dim) {}

  /// unpack(rows, stride) fills 64 rows of fp32; those inside the range reach the target.
  template <typename Unpack>
  void write(uint32_t head, uint64_t block, Unpack unpack) {
    const uint64_t start = block * kBlockTokens;
    const bool whole = start >= first_token_ && start + kBlockTokens <= first_token_ + token_count_;
    if (whole && target_.dtype == Dtype::f32 && target_.strides.dim == 1) {
      const int64_t index =
          reference::element_index(target_.strides, head, start - first_token_, 0);
      unpack(static_cast<float*>(target_.data) + index, target_.strides.token);
      return;
    }
    unpack(scratch_.data(), static_cast<int64_t>(target_.head_dim));
    const uint64_t low = start < first_token_ ? first_token_ - start : 0;
    const uint64_t high = std::min<uint64_t>(kBlockTokens, first_token_ + token_count_ - start);
    store(head, start + low - first_token_, static_cast<uint32_t>(low),
          static_cast<uint32_t>(high));
  }

 private:
  /// Rows [low, high) of the scratch, the first of them to target token `token`.
  void store(uint32_t head, uint64_t token, uint32_t low, uint32_t high);

  TargetTensor target_;
  uint64_t first_token_;
  uint64_t token_count_;
  std::vector<float> scratch_;
};

}  // namespace polykv::cpu
