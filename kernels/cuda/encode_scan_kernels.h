// The first and the fourth pass over a layer that is encoded (kernels/cuda/encode_arguments.h): what has to be known of all
// tokens before any is coded, and of all gains before any is stored.
#pragma once

#include <cstdint>

#include "kernels/cuda/encode_arguments.h"

namespace polykv::cuda {

/// Unfit values, and K's sums.
struct EncodeScanKernel {
  using Arguments = EncodeArguments;
  static constexpr uint32_t kThreads = kEncodeThreads;
  static constexpr uint32_t kMinBlocks = 4;
  enum Sync : uint32_t { kRowsScanned = 1 };
  struct Shared {
    BadValue bad[kBlockTokens];
  };

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    Shared& shared = cuda.template shared<Shared>();
    const EncodeBlock block = EncodeBlock::of(a, cuda.block_index());
    const SourceTensor& tensor = a.tensors[block.tensor];
    const uint32_t warp = cuda.thread_index() / kWarpThreads;
    const uint32_t lane = cuda.thread_index() % kWarpThreads;
    for (uint32_t slot = warp; slot < block.token_count; slot += kEncodeWarps) {
      const uint64_t token = block.first_token + slot;
      uint32_t bad_dim = kNoBadToken;
      for (uint32_t dim = lane; dim < tensor.head_dim; dim += kWarpThreads) {
        const float value = a.at(tensor, block.kv_head, token, dim);
        if (!(fabsf(value) <= kMaxMagnitude) && bad_dim == kNoBadToken) bad_dim = dim;
      }
      uint32_t first_dim = bad_dim;
      for (uint32_t mask = 16; mask > 0; mask /= 2) {
        const uint32_t other = cuda.shuffle_xor(first_dim, mask);
        if (other < first_dim) first_dim = other;
      }
      if (first_dim == kNoBadToken) {
        if (lane == 0) shared.bad[slot] = {kNoBadToken, 0};
      } else if (first_dim == bad_dim) {
        shared.bad[slot] = {static_cast<uint32_t>(token),
                            a.at(tensor, block.kv_head, token, bad_dim)};
      }
    }
    if (tensor.means != nullptr) add_up(a, tensor, block, cuda.thread_index());
    cuda.sync_threads(kRowsScanned);
    if (cuda.thread_index() != 0) return;
    BadValue first = {kNoBadToken, 0};
    for (uint32_t slot = 0; slot < block.token_count && first.token == kNoBadToken; ++slot)
      first = shared.bad[slot];
    a.bad[block.place] = first;
  }

 private:
  POLYKV_HOST_DEVICE static void add_up(const Arguments& a, const SourceTensor& tensor,
                                        const EncodeBlock& block, uint32_t thread) {
    for (uint32_t dim = thread; dim < tensor.head_dim; dim += kThreads) {
      double sum = 0;
      for (uint32_t slot = 0; slot < block.token_count; ++slot) {
        if (block.is_coded(slot))
          sum += static_cast<double>(a.at(tensor, block.kv_head, block.first_token + slot, dim));
      }
      // K is the first tensor, so its places are those of [kv_head, block].
      a.sums[block.place * tensor.head_dim + dim] = sum;
    }
  }
};

struct EncodeMeansKernel {
  using Arguments = EncodeArguments;
  static constexpr uint32_t kThreads = kEncodeThreads;
  static constexpr uint32_t kMinBlocks = 4;
  struct Shared {};

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    const SourceTensor& k = a.tensors[0];
    const uint64_t kv_head = cuda.block_index();
    const uint64_t averaged = a.token_count - a.exact_count;
    for (uint32_t dim = cuda.thread_index(); dim < k.head_dim; dim += kThreads) {
      double sum = 0;
      for (uint32_t block = 0; block < a.block_count; ++block)
        sum += a.sums[(kv_head * a.block_count + block) * k.head_dim + dim];
      k.means[kv_head * k.head_dim + dim] =
          averaged == 0 ? 0.0F : static_cast<float>(sum / static_cast<double>(averaged));
    }
  }
};

/// A layer's largest gain, norm or exact value in fp16's [2^14, 2^15), as scale_exponent() of
/// kernels/codec_rules.h has it.
POLYKV_HOST_DEVICE inline int32_t device_scale_exponent(double largest) {
  if (!(largest > 0)) return 0;
  const int32_t exponent = ilogb(largest) - 14;
  return exponent < -126 ? -126 : exponent;
}

/// A thread block for K and one for V.
struct EncodeScalesKernel {
  using Arguments = EncodeArguments;
  static constexpr uint32_t kThreads = kEncodeThreads;
  static constexpr uint32_t kMinBlocks = 4;
  enum Sync : uint32_t { kThreadsDone = 1 };
  struct Shared {
    float most[kThreads];
    float most_exact[kThreads];
    uint32_t bad_place[kThreads];
  };

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    Shared& shared = cuda.template shared<Shared>();
    const auto index = static_cast<uint32_t>(cuda.block_index());
    const uint32_t thread = cuda.thread_index();
    const SourceTensor& tensor = a.tensors[index];
    const uint32_t count = a.kv_head_count * a.block_count;
    const uint64_t first = uint64_t{index} * count;
    float most = 0;
    uint32_t bad_place = kNoBadToken;
    for (uint32_t i = thread; i < count; i += kThreads) {
      most = fmaxf(most, a.most[first + i]);
      if (a.bad[first + i].token != kNoBadToken && bad_place == kNoBadToken) bad_place = i;
    }
    float most_exact = 0;
    const uint64_t exact_values = uint64_t{a.kv_head_count} * a.exact_count * tensor.head_dim;
    for (uint64_t i = thread; i < exact_values; i += kThreads) {
      const auto dim = static_cast<uint32_t>(i % tensor.head_dim);
      const auto row = static_cast<uint32_t>(i / tensor.head_dim % a.exact_count);
      const auto kv_head = static_cast<uint32_t>(i / tensor.head_dim / a.exact_count);
      most_exact = fmaxf(most_exact, fabsf(a.at(tensor, kv_head, a.exact_tokens[row], dim)));
    }
    shared.most[thread] = most;
    shared.most_exact[thread] = most_exact;
    shared.bad_place[thread] = bad_place;
    cuda.sync_threads(kThreadsDone);
    if (thread != 0) return;
    for (uint32_t i = 1; i < kThreads; ++i) {
      most = fmaxf(most, shared.most[i]);
      most_exact = fmaxf(most_exact, shared.most_exact[i]);
      if (shared.bad_place[i] < bad_place) bad_place = shared.bad_place[i];
    }
    report(a, index, most, most_exact, bad_place);
  }

 private:
  POLYKV_HOST_DEVICE static void report(const Arguments& a, uint32_t index, float most,
                                        float most_exact, uint32_t bad_place) {
    EncodeOutcome& outcome = *a.outcome;
    const bool is_int8 = a.tensors[index].bits == 8;
    const int32_t gains = device_scale_exponent(is_int8 ? static_cast<double>(most) / 127.0
                                                        : static_cast<double>(most));
    const int32_t exact = device_scale_exponent(static_cast<double>(most_exact));
    if (index == 0) {
      const bool is_paper = a.tensors[index].is_paper;
      outcome.scales.k_scale = is_paper ? fmaxf(most / 127.0F, kPaperFloor) : 0.0F;
      outcome.scales.k_gain_exponent = is_paper ? 0 : gains;
      outcome.scales.exact_k_exponent = exact;
    } else {
      outcome.scales.v_gain_exponent = gains;
      outcome.scales.exact_v_exponent = exact;
    }
    outcome.bad[index] = {kNoBadToken, 0, 0};
    if (bad_place == kNoBadToken) return;
    const BadValue bad = a.bad[uint64_t{index} * a.kv_head_count * a.block_count + bad_place];
    outcome.bad[index] = {bad.token, bad_place / a.block_count, bad.value};
  }
};

}  // namespace polykv::cuda
