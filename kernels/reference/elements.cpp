#include "kernels/reference/elements.h"

#include <algorithm>
#include <cmath>

#include "kernels/codec_rules.h"

namespace polykv::reference {

Status check_values(const SourceTensor& source, uint32_t head_count, uint64_t token_count) {
  for (uint32_t head = 0; head < head_count; ++head) {
    for (uint64_t token = 0; token < token_count; ++token) {
      for (uint32_t dim = 0; dim < source.head_dim; ++dim) {
        const float value = source.at(head, token, dim);
        if (!(std::abs(value) <= kMaxMagnitude)) {
          return bad_value(source.is_k, token, head, value, kLossyRule);
        }
      }
    }
  }
  return Status::ok();
}

int32_t encode_exact_rows(const SourceTensor& source, const LayerSlot& slot, uint16_t* rows) {
  const auto for_each = [&](auto&& action) {
    for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
      for (uint32_t row = 0; row < slot.exact_row_count; ++row) {
        for (uint32_t dim = 0; dim < source.head_dim; ++dim) {
          const uint64_t index =
              (uint64_t{head} * slot.exact_row_capacity + row) * source.head_dim + dim;
          action(index, source.at(head, slot.exact_tokens[row], dim));
        }
      }
    }
  };
  double largest = 0;
  for_each([&](uint64_t, float value) { largest = std::max<double>(largest, std::abs(value)); });
  const int32_t exponent = scale_exponent(largest);
  for_each([&](uint64_t index, float value) { rows[index] = scaled_f16(value, exponent); });
  return exponent;
}

void decode_exact_rows(const LayerView& layer, const uint16_t* rows, int32_t exponent,
                       const DecodeTarget& range, const TargetTensor& target) {
  for (uint32_t row = 0; row < layer.exact_row_count; ++row) {
    const uint64_t token = layer.exact_tokens[row];
    if (token < range.first_token || token - range.first_token >= range.token_count) continue;
    for (uint32_t head = 0; head < layer.geometry.kv_head_count; ++head) {
      for (uint32_t dim = 0; dim < target.head_dim; ++dim) {
        const uint64_t index =
            (uint64_t{head} * layer.exact_row_capacity + row) * target.head_dim + dim;
        target.put(head, token - range.first_token, dim, from_scaled_f16(rows[index], exponent));
      }
    }
  }
}

}  // namespace polykv::reference
