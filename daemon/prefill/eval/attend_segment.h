// A segment as what comes before a model's own cache: attended to in its packed form, by the kernels that agents use.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "daemon/prefill/transformer/prefix.h"
#include "kernels/segment.h"

namespace polykv::eval {

struct FreeBytes {
  void operator()(uint8_t* bytes) const { std::free(bytes); }
};
using SegmentBytes = std::unique_ptr<uint8_t, FreeBytes>;

/// Owns the segment's bytes. Thread-safe.
class SegmentPrefix final : public Prefix {
 public:
  /// `view`: of `bytes`, all tokens of a document.
  SegmentPrefix(SegmentBytes bytes, const SegmentView& view)
      : bytes_(std::move(bytes)), view_(view) {}

  uint32_t token_count() const override { return static_cast<uint32_t>(view_.token_count()); }
  /// POLYKV_ERR_INVALID_ARGUMENT: a logit is beyond fp32.
  Status attend(const PrefixQueries& queries, float* output, float* log_sum_exp) const override;

 private:
  SegmentBytes bytes_;
  SegmentView view_;
};

}  // namespace polykv::eval
