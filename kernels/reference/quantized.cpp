// The quantised profiles (kernels/profiles.h): codes with an fp16 gain per token and kv_head, of int8
// or of rotated rows with fewer bits. K is centred by its mean over the segment's tokens that are
// not exact rows; exact rows are stored uncentred, and their slots in the blocks stay zero.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/block_layout.h"
#include "kernels/codebooks.h"
#include "kernels/codec_rules.h"
#include "kernels/reference/elements.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/rotated_rows.h"

namespace polykv::reference {

namespace {

/// A code of 8 bits is -127 to 127, others are indices of levels.
void put_code(const TensorPart& part, uint8_t* block, uint32_t token, uint32_t dim, int code) {
  uint8_t* codes = block + part.codes;
  if (part.rule.bits == 8) {
    if (part.is_k) {
      codes[k8_offset(token, dim)] = static_cast<uint8_t>(code + kKeyBias);
    } else {
      codes[v8_offset(token, dim, part.head_dim)] = static_cast<uint8_t>(code);
    }
    return;
  }
  const auto put = part.is_k ? k_put : v_put;
  put(codes, token, dim, part.head_dim, part.rule.bits, static_cast<uint32_t>(code));
}

/// What a code stands for, before its gain.
int level_at(const TensorPart& part, const uint8_t* block, uint32_t token, uint32_t dim) {
  const uint8_t* codes = block + part.codes;
  if (part.rule.bits == 8) {
    return part.is_k ? codes[k8_offset(token, dim)] - kKeyBias
                     : static_cast<int8_t>(codes[v8_offset(token, dim, part.head_dim)]);
  }
  const auto get = part.is_k ? k_get : v_get;
  return codebook(part.rule.bits).levels[get(codes, token, dim, part.head_dim, part.rule.bits)];
}

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

/// K or V of a layer on its way into the blocks.
struct Encoder {
  TensorPart part;
  const SourceTensor& source;
  const float* means;  // null: not centred
  const std::vector<bool>& exact;
  LayerSlot& slot;

  float value(uint32_t head, uint64_t token, uint32_t dim) const {
    const float mean = means == nullptr ? 0.0F : means[head * source.head_dim + dim];
    return source.at(head, token, dim) - mean;
  }
  template <typename Action>
  void for_each_row(Action action) const {
    for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
      for (uint64_t token = 0; token < slot.token_count; ++token) {
        if (!exact[token]) action(head, token, head * slot.token_count + token);
      }
    }
  }
  void put_gain(uint32_t head, uint64_t token, uint16_t gain) const {
    uint8_t* block = slot.block(head, token / kBlockTokens);
    reinterpret_cast<uint16_t*>(block + part.gains)[token % kBlockTokens] = gain;
  }
  void put(uint32_t head, uint64_t token, uint32_t dim, int code) const {
    put_code(part, slot.block(head, token / kBlockTokens),
             static_cast<uint32_t>(token % kBlockTokens), dim, code);
  }
};

/// Gives the gains' exponent, as the next one does.
int32_t encode_int8(const Encoder& encoder) {
  std::vector<float> largest(encoder.slot.geometry.kv_head_count * encoder.slot.token_count, 0.0F);
  encoder.for_each_row([&](uint32_t head, uint64_t token, size_t row) {
    for (uint32_t dim = 0; dim < encoder.source.head_dim; ++dim) {
      largest[row] = std::max(largest[row], std::abs(encoder.value(head, token, dim)));
    }
  });
  const float layer_largest = *std::max_element(largest.begin(), largest.end());
  const int32_t exponent = scale_exponent(layer_largest / 127.0);
  encoder.for_each_row([&](uint32_t head, uint64_t token, size_t row) {
    const uint16_t gain16 = int8_gain(largest[row], exponent);
    encoder.put_gain(head, token, gain16);
    const double gain = from_scaled_f16(gain16, exponent);
    for (uint32_t dim = 0; dim < encoder.source.head_dim; ++dim) {
      const double code = gain == 0 ? 0 : std::nearbyint(encoder.value(head, token, dim) / gain);
      encoder.put(head, token, dim, static_cast<int>(std::clamp(code, -127.0, 127.0)));
    }
  });
  return exponent;
}

int32_t encode_rotated(const Encoder& encoder) {
  std::vector<double> gains(encoder.slot.geometry.kv_head_count * encoder.slot.token_count, 0.0);
  std::vector<double> values(encoder.source.head_dim);
  encoder.for_each_row([&](uint32_t head, uint64_t token, size_t row) {
    for (uint32_t dim = 0; dim < values.size(); ++dim) {
      values[dim] = encoder.value(head, token, dim);
    }
    const CodedRow coded = code_row(values, encoder.part.rule);
    gains[row] = coded.gain;
    for (uint32_t dim = 0; dim < values.size(); ++dim) {
      encoder.put(head, token, dim, static_cast<int>(coded.codes[dim]));
    }
  });
  const int32_t exponent = scale_exponent(*std::max_element(gains.begin(), gains.end()));
  encoder.for_each_row([&](uint32_t head, uint64_t token, size_t row) {
    encoder.put_gain(head, token, scaled_f16(gains[row], exponent));
  });
  return exponent;
}

int32_t encode_tensor(const Encoder& encoder) {
  return encoder.part.rule.rotated ? encode_rotated(encoder) : encode_int8(encoder);
}

Status encode(const KvSource& source, LayerSlot& slot) {
  const LayerGeometry& geometry = slot.geometry;
  const ProfileRule& rule = *profile_rule(slot.profile);
  const SourceTensor k = source_k(source, geometry);
  const SourceTensor v = source_v(source, geometry);
  POLYKV_RETURN_IF_ERROR(check_values(k, geometry.kv_head_count, slot.token_count));
  POLYKV_RETURN_IF_ERROR(check_values(v, geometry.kv_head_count, slot.token_count));
  const std::vector<bool> exact = exact_token_set(slot);
  slot.scales.exact_k_exponent = encode_exact_rows(k, slot, slot.exact_k);
  slot.scales.exact_v_exponent = encode_exact_rows(v, slot, slot.exact_v);
  encode_means(k, exact, slot);
  slot.scales.k_gain_exponent =
      encode_tensor({k_part(rule, geometry), k, slot.k_means, exact, slot});
  slot.scales.v_gain_exponent = encode_tensor({v_part(rule, geometry), v, nullptr, exact, slot});
  return Status::ok();
}

void decode_tensor(const LayerView& layer, const TensorPart& part, const float* means,
                   int32_t exponent, const DecodeTarget& range, const TargetTensor& target) {
  std::vector<double> row(part.head_dim);
  for (uint32_t head = 0; head < layer.geometry.kv_head_count; ++head) {
    for (uint64_t i = 0; i < range.token_count; ++i) {
      const uint64_t token = range.first_token + i;
      const auto slot = static_cast<uint32_t>(token % kBlockTokens);
      const uint8_t* block = layer.block(head, token / kBlockTokens);
      const double gain =
          from_scaled_f16(reinterpret_cast<const uint16_t*>(block + part.gains)[slot], exponent);
      for (uint32_t dim = 0; dim < part.head_dim; ++dim) {
        row[dim] = level_at(part, block, slot, dim) * gain;
      }
      if (part.rule.rotated) rotate_back(row, part.rule);
      for (uint32_t dim = 0; dim < part.head_dim; ++dim) {
        const double mean = means == nullptr ? 0 : means[head * part.head_dim + dim];
        target.put(head, i, dim, static_cast<float>(row[dim] + mean));
      }
    }
  }
}

void decode(const LayerView& layer, const DecodeTarget& target) {
  decode_quantized(layer, target, decode_tensor);
}

}  // namespace

void decode_quantized(const LayerView& layer, const DecodeTarget& target,
                      DecodeTensor decode_tensor) {
  const LayerGeometry& geometry = layer.geometry;
  const LayerScales& scales = layer.scales;
  const ProfileRule& rule = *profile_rule(layer.profile);
  if (target.k != nullptr) {
    const TargetTensor k = target_k(target, geometry);
    decode_tensor(layer, k_part(rule, geometry), layer.k_means, scales.k_gain_exponent, target, k);
    decode_exact_rows(layer, layer.exact_k, scales.exact_k_exponent, target, k);
  }
  if (target.v != nullptr) {
    const TargetTensor v = target_v(target, geometry);
    decode_tensor(layer, v_part(rule, geometry), nullptr, scales.v_gain_exponent, target, v);
    decode_exact_rows(layer, layer.exact_v, scales.exact_v_exponent, target, v);
  }
}

const Codec* quantized_codec(Profile profile) {
  static const std::vector<Codec> codecs = quantized_codecs(encode, decode);
  return find_codec(codecs, profile);
}

}  // namespace polykv::reference
