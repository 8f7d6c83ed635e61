// `paper-k8v3`, the published method: K int8 with one scale per layer; V rows divided by their L2
// norm, rotated by a Walsh-Hadamard transform, each value to the nearest of eight. Floors and tie
// rules are the published implementation's.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/block_layout.h"
#include "kernels/codec_rules.h"
#include "kernels/reference/elements.h"
#include "kernels/reference/reference.h"

namespace polykv::reference {

namespace {

/// Unnormalised: applied twice it multiplies by the size.
void walsh_hadamard(std::vector<double>& row) {
  for (size_t half = 1; half < row.size(); half *= 2) {
    for (size_t i = 0; i < row.size(); ++i) {
      if ((i & half) != 0) continue;
      const double a = row[i];
      const double b = row[i + half];
      row[i] = a + b;
      row[i + half] = a - b;
    }
  }
}

uint32_t nearest_code(double value) {
  uint32_t best = 0;
  for (uint32_t code = 1; code < kPaperCodebook.size(); ++code) {
    if (std::abs(value - kPaperCodebook[code]) < std::abs(value - kPaperCodebook[best])) {
      best = code;
    }
  }
  return best;
}

void encode_k(const SourceTensor& k, LayerSlot& slot) {
  const uint32_t heads = slot.geometry.kv_head_count;
  const auto for_each = [&](auto&& action) {
    for (uint32_t head = 0; head < heads; ++head) {
      for (uint64_t token = 0; token < slot.token_count; ++token) {
        for (uint32_t dim = 0; dim < k.head_dim; ++dim) action(head, token, dim);
      }
    }
  };
  float largest = 0;
  for_each([&](uint32_t head, uint64_t token, uint32_t dim) {
    largest = std::max(largest, std::abs(k.at(head, token, dim)));
  });
  const float scale = std::max(largest / 127.0F, kPaperFloor);
  slot.scales.k_scale = scale;
  for_each([&](uint32_t head, uint64_t token, uint32_t dim) {
    const double code = std::nearbyint(static_cast<double>(k.at(head, token, dim)) / scale);
    uint8_t* block = slot.block(head, token / kBlockTokens);
    block[PaperBlock::k_codes + k8_offset(static_cast<uint32_t>(token % kBlockTokens), dim)] =
        static_cast<uint8_t>(std::clamp(code, -128.0, 127.0) + kKeyBias);
  });
}

void encode_v(const SourceTensor& v, LayerSlot& slot) {
  const uint32_t heads = slot.geometry.kv_head_count;
  std::vector<double> norms(heads * slot.token_count);
  double largest = 0;
  std::vector<double> row(v.head_dim);
  for (uint32_t head = 0; head < heads; ++head) {
    for (uint64_t token = 0; token < slot.token_count; ++token) {
      double squares = 0;
      for (uint32_t dim = 0; dim < v.head_dim; ++dim) {
        row[dim] = v.at(head, token, dim);
        squares += row[dim] * row[dim];
      }
      const double norm = std::sqrt(squares);
      norms[head * slot.token_count + token] = norm;
      largest = std::max(largest, norm);
      for (double& value : row) value /= std::max<double>(norm, kPaperFloor);
      walsh_hadamard(row);
      uint8_t* block = slot.block(head, token / kBlockTokens);
      for (uint32_t dim = 0; dim < v.head_dim; ++dim) {
        v3_put(block + PaperBlock::v_codes(slot.geometry),
               static_cast<uint32_t>(token % kBlockTokens), dim, v.head_dim,
               nearest_code(row[dim]));
      }
    }
  }
  const int32_t exponent = scale_exponent(largest);
  slot.scales.v_gain_exponent = exponent;
  for (uint32_t head = 0; head < heads; ++head) {
    for (uint64_t token = 0; token < slot.token_count; ++token) {
      uint8_t* block = slot.block(head, token / kBlockTokens);
      reinterpret_cast<uint16_t*>(block + PaperBlock::v_norms)[token % kBlockTokens] =
          scaled_f16(norms[head * slot.token_count + token], exponent);
    }
  }
}

Status encode(const KvSource& source, LayerSlot& slot) {
  const LayerGeometry& geometry = slot.geometry;
  const SourceTensor k = source_k(source, geometry);
  const SourceTensor v = source_v(source, geometry);
  POLYKV_RETURN_IF_ERROR(check_values(k, geometry.kv_head_count, slot.token_count));
  POLYKV_RETURN_IF_ERROR(check_values(v, geometry.kv_head_count, slot.token_count));
  encode_k(k, slot);
  encode_v(v, slot);
  return Status::ok();
}

void decode_k(const LayerView& layer, const DecodeTarget& range) {
  const TargetTensor k = target_k(range, layer.geometry);
  for (uint32_t head = 0; head < layer.geometry.kv_head_count; ++head) {
    for (uint64_t i = 0; i < range.token_count; ++i) {
      const uint64_t token = range.first_token + i;
      const uint8_t* codes = layer.block(head, token / kBlockTokens) + PaperBlock::k_codes;
      for (uint32_t dim = 0; dim < k.head_dim; ++dim) {
        const int code =
            codes[k8_offset(static_cast<uint32_t>(token % kBlockTokens), dim)] - kKeyBias;
        k.put(head, i, dim, static_cast<float>(code) * layer.scales.k_scale);
      }
    }
  }
}

void decode_v(const LayerView& layer, const DecodeTarget& range) {
  const TargetTensor v = target_v(range, layer.geometry);
  std::vector<double> row(v.head_dim);
  for (uint32_t head = 0; head < layer.geometry.kv_head_count; ++head) {
    for (uint64_t i = 0; i < range.token_count; ++i) {
      const uint64_t token = range.first_token + i;
      const auto slot = static_cast<uint32_t>(token % kBlockTokens);
      const uint8_t* block = layer.block(head, token / kBlockTokens);
      for (uint32_t dim = 0; dim < v.head_dim; ++dim) {
        row[dim] = kPaperCodebook[v3_get(block + PaperBlock::v_codes(layer.geometry), slot, dim,
                                         v.head_dim)];
      }
      walsh_hadamard(row);
      const double norm =
          from_scaled_f16(reinterpret_cast<const uint16_t*>(block + PaperBlock::v_norms)[slot],
                          layer.scales.v_gain_exponent);
      for (uint32_t dim = 0; dim < v.head_dim; ++dim) {
        v.put(head, i, dim, static_cast<float>(row[dim] / v.head_dim * norm));
      }
    }
  }
}

void decode(const LayerView& layer, const DecodeTarget& target) {
  if (target.k != nullptr) decode_k(layer, target);
  if (target.v != nullptr) decode_v(layer, target);
}

}  // namespace

const Codec& paper_k8v3_codec() {
  static const Codec codec{Profile::paper_k8v3, true,   false, false, check_paper_geometry,
                           paper_block_bytes,   encode, decode};
  return codec;
}

}  // namespace polykv::reference
