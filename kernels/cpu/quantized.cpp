// Encoding reads the source two or three times (means and unfit values, largest of each row where
// codes are int8, codes), a block at a time, so its own memory is one number a row.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/block_layout.h"
#include "kernels/codec_rules.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gains.h"
#include "kernels/cpu/tensors.h"
#include "kernels/reference/reference.h"

namespace polykv::cpu {

namespace {

constexpr int kExactRow = -1;  // in place of a row's largest value, and of its gain

/// Calls action(low, high) for each run of tokens in [first, first + count) without exact ones.
template <typename Action>
void for_each_run(const LayerSlot& slot, uint64_t first, uint64_t count, Action action) {
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

/// Calls action(head, block, rows, index of the first row in [kv_head, token]) and stops when it
/// gives false. All kv_heads of a block before the next one: most sources have them side by side.
template <typename Action>
bool for_each_block(BlockReader& reader, const LayerSlot& slot, Action action) {
  for (uint64_t block = 0; block < slot.block_count; ++block) {
    const uint64_t first = block * kBlockTokens;
    for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
      if (head + 1 < slot.geometry.kv_head_count) {
        reader.expect(head + 1, first);
      } else if (block + 1 < slot.block_count) {
        reader.expect(0, first + kBlockTokens);
      }
      const Rows rows = reader.read(head, first, block_rows(slot.token_count, block));
      if (!action(head, block, rows, head * slot.token_count + first)) return false;
    }
  }
  return true;
}

/// The largest of each row, [kv_head, token]; false when a value is not finite or too large. Also
/// adds up the means.
bool scan(BlockReader& reader, const LayerSlot& slot, std::vector<float>& largest, float* means,
          uint32_t dims) {
  std::vector<double> sums(size_t{slot.geometry.kv_head_count} * dims);
  const bool fits = for_each_block(
      reader, slot, [&](uint32_t head, uint64_t block, const Rows& rows, uint64_t row) {
        ops().max_abs(rows, nullptr, &largest[row]);
        for (uint32_t i = 0; i < rows.count; ++i) {
          if (!(largest[row + i] <= kMaxMagnitude)) return false;
        }
        if (means == nullptr) return true;
        const uint64_t first = block * kBlockTokens;
        for_each_run(slot, first, rows.count, [&](uint64_t low, uint64_t high) {
          ops().add_rows(slice(rows, low - first, high - first), &sums[size_t{head} * dims]);
        });
        return true;
      });
  const uint64_t averaged = slot.token_count - slot.exact_row_count;
  if (!fits || means == nullptr || averaged == 0) return fits;
  for (size_t i = 0; i < sums.size(); ++i)
    means[i] = static_cast<float>(sums[i] / static_cast<double>(averaged));
  return true;
}

/// K or V of a layer on its way into the blocks.
struct Encoder {
  TensorPart part;
  BlockReader& reader;
  const float* means;  // null: not centred
  const LayerSlot& slot;

  const float* head_means(uint32_t head) const {
    return means == nullptr ? nullptr : means + size_t{head} * part.head_dim;
  }
  template <typename Action>
  void for_each_block(Action action) const {
    cpu::for_each_block(reader, slot,
                        [&](uint32_t head, uint64_t block, const Rows& rows, uint64_t row) {
                          action(head, block, rows, row);
                          return true;
                        });
  }
  template <typename T>
  void mark_exact_rows(std::vector<T>& rows) const {
    for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
      for (uint32_t row = 0; row < slot.exact_row_count; ++row) {
        rows[head * slot.token_count + slot.exact_tokens[row]] = kExactRow;
      }
    }
  }
  /// Calls gain_of(row of [kv_head, token]) for each row that is not exact and stores its result.
  template <typename GainOf>
  void put_gains(GainOf gain_of) const {
    for (uint32_t head = 0; head < slot.geometry.kv_head_count; ++head) {
      for_each_run(slot, 0, slot.token_count, [&](uint64_t low, uint64_t high) {
        for (uint64_t token = low; token < high; ++token) {
          const uint16_t gain = gain_of(head * slot.token_count + token);
          std::memcpy(slot.block(head, token / kBlockTokens) + part.gains +
                          token % kBlockTokens * sizeof gain,
                      &gain, sizeof gain);
        }
      });
    }
  }
};

/// `largest`: each row's, as scan() left it. Gives the gains' exponent, as the next one does.
int32_t encode_int8(const Encoder& encoder, std::vector<float>& largest) {
  if (encoder.means != nullptr) {
    encoder.for_each_block([&](uint32_t head, uint64_t, const Rows& rows, uint64_t row) {
      ops().max_abs(rows, encoder.head_means(head), &largest[row]);
    });
  }
  encoder.mark_exact_rows(largest);
  const float layer_largest = std::max(0.0F, *std::max_element(largest.begin(), largest.end()));
  const int32_t exponent = scale_exponent(layer_largest / 127.0);
  encoder.put_gains([&](uint64_t row) {
    const uint16_t gain = int8_gain(largest[row], exponent);
    largest[row] = from_scaled_f16(gain, exponent);  // as a reader will see it
    return gain;
  });
  encoder.for_each_block([&](uint32_t head, uint64_t block, const Rows& rows, uint64_t row) {
    uint8_t* codes = encoder.slot.block(head, block) + encoder.part.codes;
    if (encoder.part.is_k) {
      ops().k8_pack(rows, encoder.head_means(head), &largest[row], codes);
    } else {
      ops().v8_pack(rows, &largest[row], codes);
    }
  });
  return exponent;
}

int32_t encode_rotated(const Encoder& encoder) {
  const TensorPart& part = encoder.part;
  std::vector<double> gains(encoder.slot.geometry.kv_head_count * encoder.slot.token_count);
  encoder.mark_exact_rows(gains);
  std::vector<uint8_t> codes(size_t{kBlockTokens} * part.head_dim);
  const auto pack = part.is_k ? ops().k_pack : ops().v_pack;
  encoder.for_each_block([&](uint32_t head, uint64_t block, const Rows& rows, uint64_t row) {
    ops().rotated_encode(rows, encoder.head_means(head), part.rule, codes.data(), &gains[row]);
    pack(codes.data(), part.head_dim, part.rule.bits, encoder.slot.block(head, block) + part.codes);
  });
  const int32_t exponent =
      scale_exponent(std::max(0.0, *std::max_element(gains.begin(), gains.end())));
  encoder.put_gains([&](uint64_t row) { return scaled_f16(gains[row], exponent); });
  return exponent;
}

Status encode(const KvSource& source, LayerSlot& slot) {
  const LayerGeometry& geometry = slot.geometry;
  const ProfileRule& rule = *profile_rule(slot.profile);
  const SourceTensor k = source_k(source, geometry);
  const SourceTensor v = source_v(source, geometry);
  BlockReader k_reader(k);
  BlockReader v_reader(v);
  std::vector<float> k_largest(geometry.kv_head_count * slot.token_count);
  std::vector<float> v_largest(k_largest.size());
  if (!scan(k_reader, slot, k_largest, slot.k_means, geometry.k_head_dim) ||
      !scan(v_reader, slot, v_largest, nullptr, geometry.v_head_dim)) {
    // The reference finds and names the value.
    return reference::quantized_codec(slot.profile)->encode(source, slot);
  }
  const auto encode_tensor = [](const Encoder& encoder, std::vector<float>& largest) {
    return encoder.part.rule.rotated ? encode_rotated(encoder) : encode_int8(encoder, largest);
  };
  LayerScales& scales = slot.scales;
  scales.exact_k_exponent = reference::encode_exact_rows(k, slot, slot.exact_k);
  scales.exact_v_exponent = reference::encode_exact_rows(v, slot, slot.exact_v);
  scales.k_gain_exponent =
      encode_tensor({k_part(rule, geometry), k_reader, slot.k_means, slot}, k_largest);
  scales.v_gain_exponent =
      encode_tensor({v_part(rule, geometry), v_reader, nullptr, slot}, v_largest);
  return Status::ok();
}

// From here on a target is written past the caches: what is written first would not be in them any
// more when the last is, and lines that are written as a whole need not be read before.
constexpr uint64_t kStreamedBytes = uint64_t{1} << 20;
constexpr uint32_t kLineBytes = 64;

/// K or V of a layer on its way out.
class Decoder {
 public:
  Decoder(const LayerView& layer, const TensorPart& part, const float* means, int32_t exponent,
          const DecodeTarget& range, const TargetTensor& target)
      : layer_(layer),
        part_(part),
        means_(means),
        exponent_(exponent),
        range_(range),
        target_(target),
        writer_(target, range.first_token, range.token_count),
        is_fused_(ops().decode_block != nullptr && part.head_dim % kFusedDimsStep == 0 &&
                  (!part.rule.rotated || part.head_dim <= kMostFusedDims) &&
                  exponent >= kLeastFusedExponent),
        codes_(is_fused_ ? 0 : size_t{kBlockTokens} * part.head_dim) {
    const auto element_bytes = static_cast<int64_t>(dtype_size_bytes(target.dtype));
    const auto starts_line = [&](int64_t elements) {
      return elements * element_bytes % kLineBytes == 0;
    };
    streams_ = range.token_count * layer.geometry.kv_head_count * part.head_dim *
                       static_cast<uint64_t>(element_bytes) >=
                   kStreamedBytes &&
               reinterpret_cast<uintptr_t>(target.data) % kLineBytes == 0 &&
               starts_line(part.head_dim) && starts_line(target.strides.token) &&
               starts_line(target.strides.head);
  }

  void decode(uint32_t head, uint64_t block) {
    float gains[kBlockTokens];
    const uint8_t* bytes = layer_.block(head, block);
    load_gains(bytes + part_.gains, exponent_, gains);
    const float* means = means_ == nullptr ? nullptr : means_ + size_t{head} * part_.head_dim;
    const BlockCodes codes{part_.rule,
                           part_.is_k,
                           bytes + part_.codes,
                           part_.head_dim,
                           gains,
                           means,
                           layer_.block(head, block + 1) + part_.codes};
    if (is_fused_ && target_.strides.dim == 1) return put(codes, head, block);
    writer_.write(head, block, [&](float* rows, int64_t stride) { unpack(codes, rows, stride); });
  }

 private:
  void put(const BlockCodes& codes, uint32_t head, uint64_t block) const {
    const uint64_t start = block * kBlockTokens;
    const uint64_t low = std::max(start, range_.first_token);
    const uint64_t high = std::min(start + kBlockTokens, range_.first_token + range_.token_count);
    const int64_t index =
        reference::element_index(target_.strides, head, low - range_.first_token, 0);
    ops().decode_block(
        codes, {static_cast<uint8_t*>(target_.data) +
                    index * static_cast<int64_t>(dtype_size_bytes(target_.dtype)),
                target_.strides.token, target_.dtype, streams_, static_cast<uint32_t>(low - start),
                static_cast<uint32_t>(high - start)});
  }

  void unpack(const BlockCodes& codes, float* rows, int64_t stride) {
    if (is_fused_) {
      ops().decode_block(codes, {rows, stride, Dtype::f32, false, 0, kBlockTokens});
    } else if (part_.rule.rotated) {
      const auto take = part_.is_k ? ops().k_unpack : ops().v_unpack;
      take(codes.codes, codes.dims, part_.rule.bits, codes_.data());
      ops().rotated_decode(codes_.data(), codes.dims, part_.rule, codes.gains, codes.means, rows,
                           stride);
    } else if (part_.is_k) {
      ops().k8_unpack(codes.codes, codes.dims, codes.gains, codes.means, rows, stride);
    } else {
      ops().v8_unpack(codes.codes, codes.dims, codes.gains, rows, stride);
    }
  }

  const LayerView& layer_;
  TensorPart part_;
  const float* means_;
  int32_t exponent_;
  const DecodeTarget& range_;
  TargetTensor target_;
  BlockWriter writer_;
  bool is_fused_;
  std::vector<uint8_t> codes_;  // of a block, where they are unpacked in a step of their own
  bool streams_;
};

void decode_tensor(const LayerView& layer, const TensorPart& part, const float* means,
                   int32_t exponent, const DecodeTarget& range, const TargetTensor& target) {
  Decoder decoder(layer, part, means, exponent, range, target);
  const uint64_t first = range.first_token / kBlockTokens;
  const uint64_t last = (range.first_token + range.token_count - 1) / kBlockTokens;
  const uint32_t heads = layer.geometry.kv_head_count;
  if (std::abs(target.strides.token) > std::abs(target.strides.head)) {
    for (uint64_t block = first; block <= last; ++block) {
      for (uint32_t head = 0; head < heads; ++head) decoder.decode(head, block);
    }
  } else {
    for (uint32_t head = 0; head < heads; ++head) {
      for (uint64_t block = first; block <= last; ++block) decoder.decode(head, block);
    }
  }
}

void decode(const LayerView& layer, const DecodeTarget& target) {
  reference::decode_quantized(layer, target, decode_tensor);
}

}  // namespace

const Codec* quantized_codec(Profile profile) {
  static const std::vector<Codec> codecs = quantized_codecs(encode, decode);
  return find_codec(codecs, profile);
}

}  // namespace polykv::cpu
