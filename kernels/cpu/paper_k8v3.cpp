#include <algorithm>
#include <vector>

#include "kernels/block_layout.h"
#include "kernels/codec_rules.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gains.h"
#include "kernels/cpu/tensors.h"
#include "kernels/reference/reference.h"

namespace polykv::cpu {

namespace {

/// The largest magnitude of K or V; above kMaxMagnitude or NaN when a value is not fit.
float largest_magnitude(BlockReader& reader, const LayerSlot& slot) {
  float result = 0;
  for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
    for (uint64_t block = 0; block < slot.block_count; ++block) {
      float largest[kBlockTokens];
      const uint32_t count = block_rows(slot.token_count, block);
      ops().max_abs(reader.read(head, block * kBlockTokens, count), nullptr, largest);
      for (uint32_t i = 0; i < count; ++i) {
        if (!(largest[i] <= kMaxMagnitude)) return largest[i];
        result = std::max(result, largest[i]);
      }
    }
  }
  return result;
}

void encode_k(BlockReader& reader, float largest, LayerSlot& slot) {
  slot.scales.k_scale = std::max(largest / 127.0F, kPaperFloor);
  float gains[kBlockTokens];
  std::fill_n(gains, kBlockTokens, slot.scales.k_scale);
  for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
    for (uint64_t block = 0; block < slot.block_count; ++block) {
      const Rows rows =
          reader.read(head, block * kBlockTokens, block_rows(slot.token_count, block));
      ops().k8_pack(rows, nullptr, gains, slot.block(head, block) + PaperBlock::k_codes);
    }
  }
}

void encode_v(BlockReader& reader, LayerSlot& slot) {
  const LayerGeometry& geometry = slot.geometry;
  std::vector<double> norms(geometry.kv_head_count * slot.token_count);
  for (uint32_t head = 0; head < geometry.kv_head_count; ++head) {
    for (uint64_t block = 0; block < slot.block_count; ++block) {
      const uint32_t count = block_rows(slot.token_count, block);
      const Rows rows = reader.read(head, block * kBlockTokens, count);
      double* row_norms = &norms[head * slot.token_count + block * kBlockTokens];
      ops().norms(rows, row_norms);
      float divisors[kBlockTokens];
      for (uint32_t i = 0; i < count; ++i) {
        divisors[i] = std::max(static_cast<float>(row_norms[i]), kPaperFloor);
      }
      ops().v3_pack(rows, divisors, slot.block(head, block) + PaperBlock::v_codes(geometry));
    }
  }
  const int32_t exponent = scale_exponent(*std::max_element(norms.begin(), norms.end()));
  slot.scales.v_gain_exponent = exponent;
  for (uint32_t head = 0; head < geometry.kv_head_count; ++head) {
    for (uint64_t token = 0; token < slot.token_count; ++token) {
      const uint16_t norm = scaled_f16(norms[head * slot.token_count + token], exponent);
      std::memcpy(slot.block(head, token / kBlockTokens) + PaperBlock::v_norms +
                      token % kBlockTokens * sizeof norm,
                  &norm, sizeof norm);
    }
  }
}

Status encode(const KvSource& source, LayerSlot& slot) {
  BlockReader k_reader(source_k(source, slot.geometry));
  BlockReader v_reader(source_v(source, slot.geometry));
  const float largest_k = largest_magnitude(k_reader, slot);
  const float largest_v = largest_magnitude(v_reader, slot);
  if (!(largest_k <= kMaxMagnitude) || !(largest_v <= kMaxMagnitude)) {
    // The reference finds and names the value.
    return reference::paper_k8v3_codec().encode(source, slot);
  }
  encode_k(k_reader, largest_k, slot);
  encode_v(v_reader, slot);
  return Status::ok();
}

void decode(const LayerView& layer, const DecodeTarget& target) {
  const LayerGeometry& geometry = layer.geometry;
  BlockWriter k_writer(target_k(target, geometry), target.first_token, target.token_count);
  BlockWriter v_writer(target_v(target, geometry), target.first_token, target.token_count);
  float k_scales[kBlockTokens];
  std::fill_n(k_scales, kBlockTokens, layer.scales.k_scale);
  const uint64_t last = (target.first_token + target.token_count - 1) / kBlockTokens;
  for (uint32_t head = 0; head < geometry.kv_head_count; ++head) {
    for (uint64_t block = target.first_token / kBlockTokens; block <= last; ++block) {
      const uint8_t* bytes = layer.block(head, block);
      if (target.k != nullptr) {
        k_writer.write(head, block, [&](float* rows, int64_t stride) {
          ops().k8_unpack(bytes + PaperBlock::k_codes, geometry.k_head_dim, k_scales, nullptr, rows,
                          stride);
        });
      }
      if (target.v != nullptr) {
        float norms[kBlockTokens];
        load_gains(bytes + PaperBlock::v_norms, layer.scales.v_gain_exponent, norms);
        v_writer.write(head, block, [&](float* rows, int64_t stride) {
          ops().v3_unpack(bytes + PaperBlock::v_codes(geometry), geometry.v_head_dim, norms, rows,
                          stride);
        });
      }
    }
  }
}

}  // namespace

const Codec& paper_k8v3_codec() {
  static const Codec codec{Profile::paper_k8v3, true,   false, false, check_paper_geometry,
                           paper_block_bytes,   encode, decode};
  return codec;
}

}  // namespace polykv::cpu
