// Encoding reads the source three times for K (means, largest of each row, codes) and twice for V,
// a block at a time, so its own memory is one float a row.
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

constexpr float kExactRow = -1;  // in place of a row's largest value, and of its gain

/// Calls action(low, high) for each run of tokens in [first, first + count) without exact ones.
template <typename Action>
void for_each_run(const LayerSlot& slot, uint64_t first, uint32_t count, Action action) {
  const uint32_t* end = slot.exact_tokens + slot.exact_row_count;
  const uint32_t* next = std::lower_bound<const uint32_t*>(slot.exact_tokens, end, first);
  uint64_t low = first;
  for (; next != end && *next < first + count; ++next) {
    if (*next > low) action(low, uint64_t{*next});
    low = uint64_t{*next} + 1;
  }
  if (low < first + count) action(low, first + count);
}

Rows slice(const Rows& rows, uint64_t from, uint64_t to) {
  return {rows.data + static_cast<int64_t>(from) * rows.stride, rows.stride,
          static_cast<uint32_t>(to - from), rows.dims};
}

/// The largest of each row, [kv_head, token]; false when a value is not finite or too large. Also
/// adds up the means.
bool scan(BlockReader& reader, const LayerSlot& slot, std::vector<float>& largest, float* means,
          uint32_t dims) {
  for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
    std::vector<double> sums(dims, 0.0);
    float* row_largest = &largest[head * slot.token_count];
    for (uint64_t block = 0; block < slot.block_count; ++block) {
      const uint64_t first = block * kBlockTokens;
      const uint32_t count = block_rows(slot.token_count, block);
      const Rows rows = reader.read(head, first, count);
      ops().max_abs(rows, nullptr, row_largest + first);
      for (uint32_t i = 0; i < count; ++i) {
        if (!(row_largest[first + i] <= kMaxMagnitude)) return false;
      }
      if (means == nullptr) continue;
      for_each_run(slot, first, count, [&](uint64_t low, uint64_t high) {
        ops().add_rows(slice(rows, low - first, high - first), sums.data());
      });
    }
    const uint64_t averaged = slot.token_count - slot.exact_row_count;
    if (means == nullptr || averaged == 0) continue;
    for (uint32_t i = 0; i < dims; ++i) {
      means[head * dims + i] = static_cast<float>(sums[i] / static_cast<double>(averaged));
    }
  }
  return true;
}

void scan_centred(BlockReader& reader, const LayerSlot& slot, std::vector<float>& largest) {
  for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
    for (uint64_t block = 0; block < slot.block_count; ++block) {
      const uint64_t first = block * kBlockTokens;
      const Rows rows = reader.read(head, first, block_rows(slot.token_count, block));
      ops().max_abs(rows, slot.k_means + head * slot.geometry.k_head_dim,
                    &largest[head * slot.token_count + first]);
    }
  }
}

/// Writes gains and gives the exponent; `largest` becomes each row's gain as a reader will see it.
int32_t encode_gains(const LayerSlot& slot, uint64_t gains_start, std::vector<float>& largest) {
  for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
    for (uint32_t row = 0; row < slot.exact_row_count; ++row) {
      largest[head * slot.token_count + slot.exact_tokens[row]] = kExactRow;
    }
  }
  const float layer_largest = std::max(0.0F, *std::max_element(largest.begin(), largest.end()));
  const int32_t exponent = scale_exponent(layer_largest / 127.0);
  for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
    for (uint64_t token = 0; token < slot.token_count; ++token) {
      float& value = largest[head * slot.token_count + token];
      if (value < 0) continue;
      const uint16_t gain = int8_gain(value, exponent);
      std::memcpy(slot.block(head, token / kBlockTokens) + gains_start + token % kBlockTokens * 2,
                  &gain, sizeof gain);
      value = from_scaled_f16(gain, exponent);
    }
  }
  return exponent;
}

Status encode(const KvSource& source, LayerSlot& slot) {
  const LayerGeometry& geometry = slot.geometry;
  const SourceTensor k = source_k(source, geometry);
  const SourceTensor v = source_v(source, geometry);
  BlockReader k_reader(k);
  BlockReader v_reader(v);
  std::vector<float> k_gains(geometry.kv_head_count * slot.token_count);
  std::vector<float> v_gains(k_gains.size());
  if (!scan(k_reader, slot, k_gains, slot.k_means, geometry.k_head_dim) ||
      !scan(v_reader, slot, v_gains, nullptr, geometry.v_head_dim)) {
    // The reference finds and names the value.
    return reference::k8v8_codec().encode(source, slot);
  }
  scan_centred(k_reader, slot, k_gains);
  LayerScales& scales = slot.scales;
  scales.exact_k_exponent = reference::encode_exact_rows(k, slot, slot.exact_k);
  scales.exact_v_exponent = reference::encode_exact_rows(v, slot, slot.exact_v);
  scales.k_gain_exponent = encode_gains(slot, K8V8Block::k_gains, k_gains);
  scales.v_gain_exponent = encode_gains(slot, K8V8Block::v_gains, v_gains);
  for (uint32_t head = 0; head < geometry.kv_head_count; ++head) {
    for (uint64_t block = 0; block < slot.block_count; ++block) {
      const uint64_t first = block * kBlockTokens;
      const uint32_t count = block_rows(slot.token_count, block);
      const uint64_t row = head * slot.token_count + first;
      uint8_t* out = slot.block(head, block);
      ops().k8_pack(k_reader.read(head, first, count), slot.k_means + head * geometry.k_head_dim,
                    &k_gains[row], out + K8V8Block::k_codes);
      ops().v8_pack(v_reader.read(head, first, count), &v_gains[row],
                    out + K8V8Block::v_codes(geometry));
    }
  }
  return Status::ok();
}

void decode(const LayerView& layer, const DecodeTarget& target) {
  const LayerGeometry& geometry = layer.geometry;
  const LayerScales& scales = layer.scales;
  const TargetTensor k = target_k(target, geometry);
  const TargetTensor v = target_v(target, geometry);
  BlockWriter k_writer(k, target.first_token, target.token_count);
  BlockWriter v_writer(v, target.first_token, target.token_count);
  const uint64_t last = (target.first_token + target.token_count - 1) / kBlockTokens;
  for (uint32_t head = 0; head < geometry.kv_head_count; ++head) {
    const float* means = layer.k_means + head * geometry.k_head_dim;
    for (uint64_t block = target.first_token / kBlockTokens; block <= last; ++block) {
      const uint8_t* bytes = layer.block(head, block);
      float gains[kBlockTokens];
      if (target.k != nullptr) {
        load_gains(bytes + K8V8Block::k_gains, scales.k_gain_exponent, gains);
        k_writer.write(head, block, [&](float* rows, int64_t stride) {
          ops().k8_unpack(bytes + K8V8Block::k_codes, geometry.k_head_dim, gains, means, rows,
                          stride);
        });
      }
      if (target.v != nullptr) {
        load_gains(bytes + K8V8Block::v_gains, scales.v_gain_exponent, gains);
        v_writer.write(head, block, [&](float* rows, int64_t stride) {
          ops().v8_unpack(bytes + K8V8Block::v_codes(geometry), geometry.v_head_dim, gains, rows,
                          stride);
        });
      }
    }
  }
  if (target.k != nullptr) {
    reference::decode_exact_rows(layer, layer.exact_k, scales.exact_k_exponent, target, k);
  }
  if (target.v != nullptr) {
    reference::decode_exact_rows(layer, layer.exact_v, scales.exact_v_exponent, target, v);
  }
}

}  // namespace

const Codec& k8v8_codec() {
  static const Codec codec{Profile::k8v8,    false,  true,  true, check_k8v8_geometry,
                           k8v8_block_bytes, encode, decode};
  return codec;
}

}  // namespace polykv::cpu
