// `k8v8`: int8 codes with an fp16 gain per token and kv_head. K is centred by its mean over the
// segment's tokens that are not exact rows; exact rows are stored uncentred, and their slots in the
// blocks stay zero.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/block_layout.h"
#include "kernels/codec_rules.h"
#include "kernels/reference/elements.h"
#include "kernels/reference/reference.h"

namespace polykv::reference {

namespace {

std::vector<bool> exact_token_set(const LayerSlot& slot) {
  std::vector<bool> exact(slot.token_count, false);
  for (uint32_t row = 0; row < slot.exact_row_count; ++row) exact[slot.exact_tokens[row]] = true;
  return exact;
}

void encode_means(const SourceTensor& k, const std::vector<bool>& exact, LayerSlot& slot) {
  for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
    for (uint32_t dim = 0; dim < k.head_dim; ++dim) {
      double sum = 0;
      uint64_t count = 0;
      for (uint64_t token = 0; token < slot.token_count; ++token) {
        if (exact[token]) continue;
        sum += k.at(head, token, dim);
        ++count;
      }
      slot.k_means[head * k.head_dim + dim] =
          count == 0 ? 0.0F : static_cast<float>(sum / static_cast<double>(count));
    }
  }
}

/// Codes and gains of K or V; gives the gains' exponent. `means` may be null. place(block, token,
/// dim, code) stores.
template <typename Place>
int32_t encode_codes(const SourceTensor& source, const float* means, const std::vector<bool>& exact,
                     LayerSlot& slot, uint64_t gains_start, Place place) {
  const uint32_t heads = slot.geometry.kv_head_count;
  const auto value = [&](uint32_t head, uint64_t token, uint32_t dim) {
    const float mean = means == nullptr ? 0.0F : means[head * source.head_dim + dim];
    return source.at(head, token, dim) - mean;
  };
  std::vector<float> largest(heads * slot.token_count, 0.0F);
  for (uint32_t head = 0; head < heads; ++head) {
    for (uint64_t token = 0; token < slot.token_count; ++token) {
      if (exact[token]) continue;
      float& row = largest[head * slot.token_count + token];
      for (uint32_t dim = 0; dim < source.head_dim; ++dim) {
        row = std::max(row, std::abs(value(head, token, dim)));
      }
    }
  }
  const float layer_largest = *std::max_element(largest.begin(), largest.end());
  const int32_t exponent = scale_exponent(layer_largest / 127.0);
  for (uint32_t head = 0; head < heads; ++head) {
    for (uint64_t token = 0; token < slot.token_count; ++token) {
      if (exact[token]) continue;
      uint8_t* block = slot.block(head, token / kBlockTokens);
      const auto row = static_cast<uint32_t>(token % kBlockTokens);
      const uint16_t gain16 = int8_gain(largest[head * slot.token_count + token], exponent);
      reinterpret_cast<uint16_t*>(block + gains_start)[row] = gain16;
      const double gain = from_scaled_f16(gain16, exponent);
      for (uint32_t dim = 0; dim < source.head_dim; ++dim) {
        const double code = gain == 0 ? 0 : std::nearbyint(value(head, token, dim) / gain);
        place(block, row, dim, static_cast<int>(std::clamp(code, -127.0, 127.0)));
      }
    }
  }
  return exponent;
}

Status encode(const KvSource& source, LayerSlot& slot) {
  const LayerGeometry& geometry = slot.geometry;
  const SourceTensor k = source_k(source, geometry);
  const SourceTensor v = source_v(source, geometry);
  POLYKV_RETURN_IF_ERROR(check_values(k, geometry.kv_head_count, slot.token_count));
  POLYKV_RETURN_IF_ERROR(check_values(v, geometry.kv_head_count, slot.token_count));
  const std::vector<bool> exact = exact_token_set(slot);
  slot.scales.exact_k_exponent = encode_exact_rows(k, slot, slot.exact_k);
  slot.scales.exact_v_exponent = encode_exact_rows(v, slot, slot.exact_v);
  encode_means(k, exact, slot);
  slot.scales.k_gain_exponent = encode_codes(
      k, slot.k_means, exact, slot, K8V8Block::k_gains,
      [](uint8_t* block, uint32_t token, uint32_t dim, int code) {
        block[K8V8Block::k_codes + k8_offset(token, dim)] = static_cast<uint8_t>(code + kKeyBias);
      });
  const uint64_t v_codes = K8V8Block::v_codes(geometry);
  slot.scales.v_gain_exponent =
      encode_codes(v, nullptr, exact, slot, K8V8Block::v_gains,
                   [&](uint8_t* block, uint32_t token, uint32_t dim, int code) {
                     block[v_codes + v8_offset(token, dim, geometry.v_head_dim)] =
                         static_cast<uint8_t>(static_cast<int8_t>(code));
                   });
  return Status::ok();
}

float gain_at(const uint8_t* gains, uint32_t token, int32_t exponent) {
  return from_scaled_f16(reinterpret_cast<const uint16_t*>(gains)[token], exponent);
}

/// decode_code(block, token, dim) gives code * gain + mean of head.
template <typename Decode>
void decode_blocks(const LayerView& layer, const DecodeTarget& range, const TargetTensor& target,
                   Decode decode_code) {
  for (uint32_t head = 0; head < layer.geometry.kv_head_count; ++head) {
    for (uint64_t i = 0; i < range.token_count; ++i) {
      const uint64_t token = range.first_token + i;
      const uint8_t* block = layer.block(head, token / kBlockTokens);
      for (uint32_t dim = 0; dim < target.head_dim; ++dim) {
        const double value =
            decode_code(block, head, static_cast<uint32_t>(token % kBlockTokens), dim);
        target.put(head, i, dim, static_cast<float>(value));
      }
    }
  }
}

void decode(const LayerView& layer, const DecodeTarget& target) {
  const LayerGeometry& geometry = layer.geometry;
  const LayerScales& scales = layer.scales;
  if (target.k != nullptr) {
    const TargetTensor k = target_k(target, geometry);
    decode_blocks(
        layer, target, k, [&](const uint8_t* block, uint32_t head, uint32_t token, uint32_t dim) {
          const int code = block[K8V8Block::k_codes + k8_offset(token, dim)] - kKeyBias;
          const double gain = gain_at(block + K8V8Block::k_gains, token, scales.k_gain_exponent);
          return code * gain + layer.k_means[head * geometry.k_head_dim + dim];
        });
    decode_exact_rows(layer, layer.exact_k, scales.exact_k_exponent, target, k);
  }
  if (target.v != nullptr) {
    const TargetTensor v = target_v(target, geometry);
    const uint64_t v_codes = K8V8Block::v_codes(geometry);
    decode_blocks(
        layer, target, v, [&](const uint8_t* block, uint32_t, uint32_t token, uint32_t dim) {
          const auto code =
              static_cast<int8_t>(block[v_codes + v8_offset(token, dim, geometry.v_head_dim)]);
          return code * static_cast<double>(
                            gain_at(block + K8V8Block::v_gains, token, scales.v_gain_exponent));
        });
    decode_exact_rows(layer, layer.exact_v, scales.exact_v_exponent, target, v);
  }
}

}  // namespace

const Codec& k8v8_codec() {
  static const Codec codec{Profile::k8v8,    false,  true,  true, check_k8v8_geometry,
                           k8v8_block_bytes, encode, decode};
  return codec;
}

}  // namespace polykv::reference
