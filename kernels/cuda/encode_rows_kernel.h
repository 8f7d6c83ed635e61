// The third pass over a layer that is encoded: the rows of 64 tokens and a kv_head, of K or of V. A warp takes a row at a
// time: it is centred, brought to a power of two around 1, rotated, tried with 13 scales; the one with the least squared
// error gives the codes, which are packed when all rows of the block are there. Of int8 rows only the largest value is
// taken: their gains wait for the layer's exponent.
//
// A value's nearest level is looked up: between two levels, which are integers, lies a multiple of a half, so the code
// follows from ceil(2 value / scale).
//
// Bytes per token and kv_head: the source's three times (scan, rows, exact rows aside), the codes once. About 13 * (lookup,
// multiply, square) a value: bound by arithmetic.
#pragma once

#include <cstdint>

#include "kernels/cuda/encode_arguments.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/rotate_row.h"

namespace polykv::cuda {

struct EncodeRowsArguments {
  EncodeArguments layer;
  struct Book {
    int8_t levels[64];
    float inverse_unit;
    float scales[kScaleCandidates];  // ascending
  } books[2];                        // of K's and of V's bits, where those are not 8
  float paper_boundaries[7];         // between the levels of paper-k8v3's V, ascending
};

struct EncodeRowsKernel {
  using Arguments = EncodeRowsArguments;
  using Book = EncodeRowsArguments::Book;
  static constexpr uint32_t kThreads = kEncodeThreads;
  static constexpr uint32_t kMinBlocks = 3;
  static constexpr uint32_t kLaneDims = kMaxDeviceHeadDim / kWarpThreads;
  // Twice the largest level, and a place for what is above every level.
  static constexpr int32_t kReach = 2 * 108;
  enum Sync : uint32_t { kTableMade = 1, kRowLoaded, kPiecesDone, kRotated, kRowRead, kRowsCoded };

  struct Shared {
    alignas(16) uint8_t codes[kBlockTokens * kMaxDeviceHeadDim];
    float rows[kEncodeWarps][kMaxDeviceHeadDim];
    uint8_t nearest[2 * kReach + 2];  // [ceil(2 value) + kReach]
    int8_t levels[64];
    float most[kEncodeWarps];
  };

  struct Warp {
    const EncodeArguments& a;
    const SourceTensor& tensor;
    const Book& book;
    const float (&paper_boundaries)[7];
    const EncodeBlock& block;
    Shared& shared;
    uint32_t warp;
    uint32_t lane;
  };

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& arguments) {
    const EncodeArguments& a = arguments.layer;
    const EncodeBlock block = EncodeBlock::of(a, cuda.block_index());
    const Warp w{a,
                 a.tensors[block.tensor],
                 arguments.books[block.tensor],
                 arguments.paper_boundaries,
                 block,
                 cuda.template shared<Shared>(),
                 cuda.thread_index() / kWarpThreads,
                 cuda.thread_index() % kWarpThreads};
    if (w.tensor.is_rotated && !w.tensor.is_paper) make_table(w, cuda.thread_index());
    cuda.sync_threads(kTableMade);
    float most = 0;
    for (uint32_t slot = w.warp; slot < kBlockTokens; slot += kEncodeWarps) {
      float number = 0;
      if (block.is_coded(slot)) {
        number = w.tensor.is_rotated ? code_row(cuda, w, slot) : largest_of(cuda, w, slot);
      } else if (w.tensor.is_rotated) {
        for (uint32_t dim = w.lane; dim < w.tensor.head_dim; dim += kWarpThreads)
          w.shared.codes[slot * w.tensor.head_dim + dim] = 0;
      }
      if (w.lane == 0) a.numbers[block.place * kBlockTokens + slot] = number;
      most = fmaxf(most, number);
    }
    if (w.lane == 0) w.shared.most[w.warp] = most;
    cuda.sync_threads(kRowsCoded);
    if (cuda.thread_index() == 0) {
      for (uint32_t i = 1; i < kEncodeWarps; ++i) most = fmaxf(most, w.shared.most[i]);
      a.most[block.place] = most;
    }
    if (w.tensor.is_rotated) store_codes(w, cuda.thread_index());
  }

 private:
  POLYKV_HOST_DEVICE static void make_table(const Warp& w, uint32_t thread) {
    const uint32_t size = 1U << w.tensor.bits;
    const auto level = [&](uint32_t code) -> int32_t { return w.book.levels[code]; };
    if (thread < size) w.shared.levels[thread] = static_cast<int8_t>(level(thread));
    for (uint32_t i = thread; i < 2 * kReach + 2; i += kThreads) {
      // Above the middle between two levels the upper one is nearer; at it, the lower one is taken.
      uint32_t code = 0;
      while (code + 1 < size && level(code) + level(code + 1) < static_cast<int32_t>(i) - kReach)
        ++code;
      w.shared.nearest[i] = static_cast<uint8_t>(code);
    }
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static float largest_of(Thread& cuda, const Warp& w, uint32_t slot) {
    float largest = 0;
    for (uint32_t dim = w.lane; dim < w.tensor.head_dim; dim += kWarpThreads) {
      largest = fmaxf(
          largest, fabsf(w.a.centred(w.tensor, w.block.kv_head, w.block.first_token + slot, dim)));
    }
    return warp_maximum(cuda, largest);
  }

  POLYKV_HOST_DEVICE static uint32_t nearest_code(const Warp& w, float value) {
    const float doubled = ceilf(2 * value);
    const float reach = static_cast<float>(kReach);
    const float clamped = fminf(fmaxf(doubled, -reach), reach + 1);
    return w.shared.nearest[static_cast<int32_t>(clamped) + kReach];
  }

  /// Gives the row's gain; its codes are in the tile.
  template <typename Thread>
  POLYKV_HOST_DEVICE static float code_row(Thread& cuda, const Warp& w, uint32_t slot) {
    const uint32_t head_dim = w.tensor.head_dim;
    float* row = w.shared.rows[w.warp];
    float values[kLaneDims];
    float largest = 0;
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kLaneDims; ++i) {
      const uint32_t dim = w.lane + i * kWarpThreads;
      values[i] = dim < head_dim
                      ? w.a.centred(w.tensor, w.block.kv_head, w.block.first_token + slot, dim)
                      : 0.0F;
      largest = fmaxf(largest, fabsf(values[i]));
    }
    largest = warp_maximum(cuda, largest);
    int exponent = 0;
    if (largest > 0) frexpf(largest, &exponent);
    float energy = 0;
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kLaneDims; ++i) {
      values[i] = ldexpf(values[i], -exponent);
      energy += values[i] * values[i];
    }
    energy = warp_sum(cuda, energy);
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kLaneDims; ++i) {
      const uint32_t dim = w.lane + i * kWarpThreads;
      if (dim < head_dim) row[dim] = w.tensor.signs.turns(dim) ? -values[i] : values[i];
    }
    cuda.sync_warp(kRowLoaded);
    transform_row(cuda, row, head_dim, kPiecesDone, kRotated);
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kLaneDims; ++i) {
      const uint32_t dim = w.lane + i * kWarpThreads;
      values[i] = dim < head_dim ? row[dim] : 0.0F;
    }
    cuda.sync_warp(kRowRead);
    if (w.tensor.is_paper) {
      const float norm = sqrtf(energy);
      store_paper_row(w, slot, values, fmaxf(norm, ldexpf(kPaperFloor, -exponent)));
      return ldexpf(norm, exponent);
    }
    const float expected = sqrtf(energy / static_cast<float>(head_dim)) * w.book.inverse_unit;
    const float scale = best_scale(cuda, w, values, expected);
    return ldexpf(store_row(cuda, w, slot, values, scale, energy), exponent);
  }

  /// The one of the candidates with the least squared error, the smallest of several. 0 for a row of
  /// zeros.
  template <typename Thread>
  POLYKV_HOST_DEVICE static float best_scale(Thread& cuda, const Warp& w,
                                             const float (&values)[kLaneDims], float expected) {
    if (!(expected > 0)) return 0;  // the same for all lanes
    float best = 0;
    float least_error = INFINITY;
    for (uint32_t candidate = 0; candidate < kScaleCandidates; ++candidate) {
      const float scale = w.book.scales[candidate] * expected;
      const float inverse = 1 / scale;
      float error = 0;
      POLYKV_UNROLL
      for (uint32_t i = 0; i < kLaneDims; ++i) {
        if (w.lane + i * kWarpThreads >= w.tensor.head_dim) break;
        const float level = w.shared.levels[nearest_code(w, values[i] * inverse)];
        const float difference = values[i] - scale * level;
        error += difference * difference;
      }
      error = warp_sum(cuda, error);
      if (error < least_error) {
        least_error = error;
        best = scale;
      }
    }
    return best;
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static float store_row(Thread& cuda, const Warp& w, uint32_t slot,
                                            const float (&values)[kLaneDims], float scale,
                                            float energy) {
    const float inverse = scale > 0 ? 1 / scale : 0.0F;
    float product = 0;
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kLaneDims; ++i) {
      const uint32_t dim = w.lane + i * kWarpThreads;
      if (dim >= w.tensor.head_dim) break;
      const uint32_t code = scale > 0 ? nearest_code(w, values[i] * inverse) : 0;
      w.shared.codes[slot * w.tensor.head_dim + dim] = static_cast<uint8_t>(code);
      product += values[i] * static_cast<float>(w.shared.levels[code]);
    }
    product = warp_sum(cuda, product);
    return scale > 0 ? energy / product : 0.0F;
  }

  /// A row is brought to a norm of sqrt(head_dim); at a boundary the lower level is taken.
  POLYKV_HOST_DEVICE static void store_paper_row(const Warp& w, uint32_t slot,
                                                 const float (&values)[kLaneDims], float norm) {
    const float inverse = sqrtf(static_cast<float>(w.tensor.head_dim)) / norm;
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kLaneDims; ++i) {
      const uint32_t dim = w.lane + i * kWarpThreads;
      if (dim >= w.tensor.head_dim) break;
      uint32_t code = 0;
      for (const float boundary : w.paper_boundaries) code += values[i] * inverse > boundary;
      w.shared.codes[slot * w.tensor.head_dim + dim] = static_cast<uint8_t>(code);
    }
  }

  POLYKV_HOST_DEVICE static void store_codes(const Warp& w, uint32_t thread) {
    const CodeTile tile{w.shared.codes, w.tensor.head_dim, w.tensor.head_dim, w.tensor.bits};
    auto* words = reinterpret_cast<uint32_t*>(w.block.bytes(w.a) + w.tensor.codes);
    for (uint32_t i = thread; i < tile.word_count(); i += kThreads)
      words[i] = w.tensor.is_k ? k_word(tile, i) : v_word(tile, i);
  }
};

}  // namespace polykv::cuda
