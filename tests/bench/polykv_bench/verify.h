// What results must be close to: the reference's decoding of the leased bytes, and attention to it
// in double precision.
#pragma once

#include <cstdint>
#include <vector>

#include "polykv/polykv.hpp"
#include "tests/bench/polykv_bench/options.h"

namespace polykv::bench {

/// K and V of tokens [first, first + count), dense [token, kv_head, dim].
struct DecodedRange {
  uint64_t first = 0;
  uint64_t count = 0;
  std::vector<float> k;
  std::vector<float> v;
};
DecodedRange reference_decode(const client::Lease& lease, const Shape& shape, uint32_t layer,
                              uint64_t first, uint64_t count);

/// |a - b| / |b|
double relative_error(const std::vector<float>& a, const std::vector<float>& b);

/// Softmax attention of one query of one kv_head to all of a range; scale 1 / sqrt(head_dim).
std::vector<float> reference_attention(const DecodedRange& cache, const Shape& shape,
                                       uint32_t kv_head, const float* query);

/// Token ranges in which timed code is compared: the first and the last tokens of a document, few
/// enough for the reference.
struct Sample {
  uint32_t layer;
  uint64_t first;
  uint64_t count;
};
std::vector<Sample> samples_of(const Shape& shape);

}  // namespace polykv::bench
