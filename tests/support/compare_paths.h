// What two implementations of a codec made of the same values: the tolerances of docs/segment-format.md.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/block_layout.h"
#include "kernels/codebooks.h"
#include "kernels/codec_rules.h"
#include "kernels/reference/rotated_rows.h"
#include "tests/support/relative_error.h"
#include "tests/support/segments.h"

namespace polykv::test {

inline uint16_t gain_at(const LayerView& layer, uint32_t head, uint64_t token, uint64_t start) {
  uint16_t gain;
  std::memcpy(&gain, layer.block(head, token / 64) + start + token % 64 * 2, sizeof gain);
  return gain;
}

inline uint32_t code_at(const LayerView& layer, const TensorPart& part, uint32_t head,
                        uint64_t token, uint32_t dim) {
  const uint8_t* codes = layer.block(head, token / 64) + part.codes;
  const auto slot = static_cast<uint32_t>(token % 64);
  if (part.rule.bits < 8)
    return (part.is_k ? k_get : v_get)(codes, slot, dim, part.head_dim, part.rule.bits);
  // int8 as a step from -128 on.
  return part.is_k ? codes[k8_offset(slot, dim)]
                   : codes[v8_offset(slot, dim, part.head_dim)] ^ 0x80U;
}

/// Whether another of the encoder's scales is as good for this row as the best one, within 1e-5.
inline bool scales_tie(const LayerValues& values, const LayerView& layer, const TensorPart& part,
                       uint32_t head, uint64_t token) {
  std::vector<double> row(part.head_dim);
  double energy = 0;
  for (uint32_t i = 0; i < part.head_dim; ++i) {
    const std::vector<float>& tensor = part.is_k ? values.k : values.v;
    row[i] = double{tensor[(head * values.token_count + token) * part.head_dim + i]} -
             (part.is_k ? layer.k_means[head * part.head_dim + i] : 0.0F);
    energy += row[i] * row[i];
  }
  reference::rotate(row, part.rule);
  const Codebook& book = codebook(part.rule.bits);
  std::vector<double> errors;
  for (uint32_t i = 0; i < kScaleCandidates; ++i) {
    const double scale = book.scale(i) * std::sqrt(energy / part.head_dim) / book.unit;
    double error = 0;
    for (const double value : row) {
      double least = 1e300;
      for (uint32_t code = 0; code < book.size; ++code) {
        least = std::min(least, square(value - scale * book.levels[code]));
      }
      error += least;
    }
    errors.push_back(error);
  }
  std::sort(errors.begin(), errors.end());
  return errors[1] <= errors[0] * (1 + 1e-5);
}

struct Differences {
  uint64_t far = 0;    // gains beyond an ulp, codes beyond a step
  uint64_t codes = 0;  // by one step
  uint64_t excused_rows = 0;
};

/// Of K's or V's rows; those with tied scales are only counted.
inline Differences compare(const LayerValues& values, const LayerView& want, const LayerView& got,
                           const TensorPart& part) {
  Differences result;
  for (uint32_t head = 0; head < want.geometry.kv_head_count; ++head) {
    for (uint64_t token = 0; token < want.token_count; ++token) {
      Differences row;
      for (uint32_t dim = 0; dim < part.head_dim; ++dim) {
        const int step = static_cast<int>(code_at(want, part, head, token, dim)) -
                         static_cast<int>(code_at(got, part, head, token, dim));
        if (step != 0) ++(std::abs(step) == 1 ? row.codes : row.far);
      }
      const int gain_steps =
          std::abs(gain_at(want, head, token, part.gains) - gain_at(got, head, token, part.gains));
      // The gain of rotated rows follows from their codes: with one a step off it moves as well.
      if (gain_steps > (part.rule.rotated && row.codes > 0 ? 16 : 1)) ++row.far;
      if (row.far + row.codes > 0 && part.rule.rotated &&
          scales_tie(values, want, part, head, token)) {
        ++result.excused_rows;
      } else {
        result.far += row.far;
        result.codes += row.codes;
      }
    }
  }
  return result;
}

}  // namespace polykv::test
