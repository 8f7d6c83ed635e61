// The last pass over a layer that is encoded: the gains as fp16 in the layer's exponent, the codes of int8 rows, which
// follow from them, and the exact rows. And `exact`, which is encoded in one pass.
#pragma once

#include <cstdint>

#include "kernels/cuda/encode_arguments.h"
#include "kernels/cuda/pack.h"

namespace polykv::cuda {

/// int8_gain() of kernels/codec_rules.h.
POLYKV_HOST_DEVICE inline uint16_t device_int8_gain(float largest, int32_t exponent) {
  const double wanted = static_cast<double>(largest) / 127.0;
  uint16_t gain = to_f16(static_cast<float>(ldexp(wanted, -exponent)));
  if (static_cast<double>(from_f16(gain)) * 127.5 < ldexp(static_cast<double>(largest), -exponent))
    ++gain;
  return gain;
}

/// A thread block for each block of K and of V.
struct EncodeFinishKernel {
  using Arguments = EncodeArguments;
  static constexpr uint32_t kThreads = kEncodeThreads;
  static constexpr uint32_t kMinBlocks = 4;
  enum Sync : uint32_t { kGainsStored = 1, kRowsCoded };
  struct Shared {
    alignas(16) uint8_t codes[kBlockTokens * kMaxDeviceHeadDim];
    float gains[kBlockTokens];  // as a reader will see them
  };

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    Shared& shared = cuda.template shared<Shared>();
    const EncodeBlock block = EncodeBlock::of(a, cuda.block_index());
    const SourceTensor& tensor = a.tensors[block.tensor];
    const LayerScales& scales = a.outcome->scales;
    const int32_t exponent = tensor.is_k ? scales.k_gain_exponent : scales.v_gain_exponent;
    if (cuda.thread_index() < kBlockTokens)
      store_gain(a, tensor, block, shared, cuda.thread_index(), exponent);
    cuda.sync_threads(kGainsStored);
    if (tensor.is_rotated) return;
    for (uint32_t i = cuda.thread_index(); i < kBlockTokens * tensor.head_dim; i += kThreads)
      shared.codes[i] = code(a, tensor, block, shared, i / tensor.head_dim, i % tensor.head_dim);
    cuda.sync_threads(kRowsCoded);
    const CodeTile tile{shared.codes, tensor.head_dim, tensor.head_dim, tensor.bits};
    auto* words = reinterpret_cast<uint32_t*>(block.bytes(a) + tensor.codes);
    for (uint32_t i = cuda.thread_index(); i < tile.word_count(); i += kThreads)
      words[i] = tensor.is_k ? k_word(tile, i) : v_word(tile, i);
  }

 private:
  POLYKV_HOST_DEVICE static void store_gain(const Arguments& a, const SourceTensor& tensor,
                                            const EncodeBlock& block, Shared& shared, uint32_t slot,
                                            int32_t exponent) {
    if (tensor.gains == kNoGains) {
      shared.gains[slot] = a.outcome->scales.k_scale;
      return;
    }
    const float number = a.numbers[block.place * kBlockTokens + slot];
    uint16_t gain = 0;
    if (block.is_coded(slot)) {
      gain = tensor.is_rotated ? to_f16(ldexpf(number, -exponent))
                               : device_int8_gain(number, exponent);
    }
    shared.gains[slot] = ldexpf(from_f16(gain), exponent);
    reinterpret_cast<uint16_t*>(block.bytes(a) + tensor.gains)[slot] = gain;
  }

  POLYKV_HOST_DEVICE static uint8_t code(const Arguments& a, const SourceTensor& tensor,
                                         const EncodeBlock& block, const Shared& shared,
                                         uint32_t slot, uint32_t dim) {
    if (!block.is_coded(slot)) return 0;
    const float gain = shared.gains[slot];
    const float value = a.centred(tensor, block.kv_head, block.first_token + slot, dim);
    const float level = gain == 0 ? 0.0F : rintf(value / gain);
    const auto clamped = static_cast<int32_t>(fminf(fmaxf(level, -127.0F), 127.0F));
    return static_cast<uint8_t>(tensor.is_k ? clamped + kKeyBias : clamped);
  }
};

/// A thread block for each kv_head of K and of V.
struct EncodeExactRowsKernel {
  using Arguments = EncodeArguments;
  static constexpr uint32_t kThreads = kEncodeThreads;
  static constexpr uint32_t kMinBlocks = 4;
  struct Shared {};

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    const auto kv_head = static_cast<uint32_t>(cuda.block_index() % a.kv_head_count);
    const SourceTensor& tensor = a.tensors[cuda.block_index() / a.kv_head_count];
    const LayerScales& scales = a.outcome->scales;
    const int32_t exponent = tensor.is_k ? scales.exact_k_exponent : scales.exact_v_exponent;
    uint16_t* rows = tensor.exact_rows + uint64_t{kv_head} * a.exact_capacity * tensor.head_dim;
    for (uint32_t i = cuda.thread_index(); i < a.exact_count * tensor.head_dim; i += kThreads) {
      const float value =
          a.at(tensor, kv_head, a.exact_tokens[i / tensor.head_dim], i % tensor.head_dim);
      rows[i] = to_f16(ldexpf(value, -exponent));
    }
  }
};

/// `exact`: a thread block for each block of K and of V.
struct EncodeCopyKernel {
  using Arguments = EncodeArguments;
  static constexpr uint32_t kThreads = kEncodeThreads;
  static constexpr uint32_t kMinBlocks = 4;
  enum Sync : uint32_t { kCopied = 1 };
  struct Shared {
    BadValue bad[kThreads];
  };

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    Shared& shared = cuda.template shared<Shared>();
    const EncodeBlock block = EncodeBlock::of(a, cuda.block_index());
    const SourceTensor& tensor = a.tensors[block.tensor];
    uint8_t* rows = block.bytes(a) + tensor.codes;
    BadValue bad = {kNoBadToken, 0};
    for (uint32_t i = cuda.thread_index(); i < block.token_count * tensor.head_dim; i += kThreads) {
      const uint64_t token = block.first_token + i / tensor.head_dim;
      const float value = a.at(tensor, block.kv_head, token, i % tensor.head_dim);
      store_element(rows, a.stored_dtype, i, value);
      const float stored = load_element(rows, a.stored_dtype, i);
      if (!(fabsf(stored) <= 3.40282347e38F) && bad.token == kNoBadToken)
        bad = {static_cast<uint32_t>(token), value};
    }
    shared.bad[cuda.thread_index()] = bad;
    cuda.sync_threads(kCopied);
    if (cuda.thread_index() != 0) return;
    for (uint32_t i = 1; i < kThreads; ++i) {
      if (shared.bad[i].token < bad.token) bad = shared.bad[i];
    }
    a.bad[block.place] = bad;
    a.most[block.place] = 0;
  }
};

}  // namespace polykv::cuda
