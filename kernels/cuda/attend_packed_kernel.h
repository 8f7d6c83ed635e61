// Attention of a tile of rows to the packed blocks of a split: four warps take blocks in turn, each with a softmax of its
// own; at the end they are joined into one partial result.
//
// A warp and a block of 64 tokens (kernels/block_layout.h):
//
//   keys     a lane has tokens `lane` and `lane` + 32; levels, four int8 a word, times the query's two int8 terms
//   softmax  maxima over the warp; weights relative to the block's maximum times the values' gains become fixed-point
//            numbers of two int8 terms, which lanes exchange so that a word has the tokens of a word of V
//   values   a lane has dims `lane`, `lane` + 32, ...; levels times the weights' words. Sums are added to fp32 outputs in
//            shared memory, of which each lane touches its own dims alone
//
// Everything unpacked serves all rows of the tile. Outputs stay rotated; K's mean comes in with the logits.
//
// Bytes per token and kv_head: the packed ones, once for each tile of rows. Tolerance: fixed point of 15 bits on either
// side, 4e-5 of |q| |k| in logits and 6e-5 of the largest value in outputs.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_arguments.h"
#include "kernels/cuda/thread.h"

namespace polykv::cuda {

struct AttendPackedArguments {
  PackedTensor k;  // without blocks, means and units: those are the parts'
  PackedTensor v;
  uint32_t kv_head_count;
  uint32_t tile_count;    // of a kv_head's rows
  uint32_t split_blocks;  // blocks of a split
  AttendRows rows;
  AttendWorkspace workspace;
  uint32_t first_part;   // in the workspace
  uint32_t first_place;  // of the workspace's splits, where these begin
  uint32_t split_count;  // of these parts
  AttendPart parts[kMaxParts];
};

/// Rows: of a tile, 1, 2, 4 or 8.
template <uint32_t Rows>
struct AttendPackedKernel {
  using Arguments = AttendPackedArguments;
  static constexpr uint32_t kWarps = 4;
  static constexpr uint32_t kThreads = kWarps * kWarpThreads;
  static constexpr uint32_t kMinBlocks = Rows == 8 ? 3 : Rows == 4 ? 5 : 8;
  enum Sync : uint32_t { kQueriesLoaded = 1, kWeightsWritten, kWeightsUsed, kWarpsDone };

  /// The factors of two words of levels: [word][term]. Read at once.
  struct alignas(16) Factors {
    uint32_t words[4];
  };
  struct Shared {
    Factors queries[Rows][kMaxDeviceHeadDim / 8];
    Factors weights[kWarps][Rows][kBlockTokens / 8];
    float outputs[kWarps][Rows][kMaxDeviceHeadDim];
    float steps[Rows];
    float mean_logits[Rows];
    uint64_t first_seen[Rows];
    SplitState states[kWarps][Rows];
  };

  /// A thread's place and its rows' softmax, of which each lane has the sum over its own tokens.
  struct Warp {
    const Arguments& a;
    Shared& shared;
    const AttendPart& part;
    uint32_t warp;
    uint32_t lane;
    uint32_t kv_head;
    uint32_t row_count;  // of the tile, up to Rows
    float maximum[Rows];
    float sum[Rows];
    // Of the block at hand: what outputs so far and the new products are multiplied by.
    float old_factor[Rows];
    float new_factor[Rows];
  };

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    const AttendTile tile = AttendTile::of(a, cuda.block_index(), Rows);
    Warp w{a,
           cuda.template shared<Shared>(),
           a.parts[tile.part],
           cuda.thread_index() / kWarpThreads,
           cuda.thread_index() % kWarpThreads,
           tile.kv_head,
           tile.row_count,
           {},
           {},
           {},
           {}};
    load_queries(w, tile);
    cuda.sync_threads(kQueriesLoaded);
    attend_blocks(cuda, w, tile);
    POLYKV_UNROLL
    for (uint32_t r = 0; r < Rows; ++r) {
      const float sum = warp_sum(cuda, w.sum[r]);
      if (w.lane == 0) w.shared.states[w.warp][r] = {w.maximum[r], sum};
    }
    cuda.sync_threads(kWarpsDone);
    join_warps<kWarps>(w.shared, cuda.thread_index(), tile, {a.v.head_dim, 0, a.v.head_dim},
                       w.part.v_unit, a.workspace);
  }

 private:
  POLYKV_HOST_DEVICE static void load_queries(Warp& w, const AttendTile& tile) {
    const Arguments& a = w.a;
    const uint32_t words = a.k.head_dim / 2;
    const uint32_t thread = w.warp * kWarpThreads + w.lane;
    for (uint32_t r = 0; r < Rows; ++r) {
      // Rows that the last tile lacks are those of zeros.
      const bool exists = r < w.row_count;
      for (uint32_t i = thread; i < words; i += kThreads)
        w.shared.queries[r][i / 4].words[i % 4] =
            exists ? a.workspace.words[(tile.row + r) * words + i] : 0;
      w.maximum[r] = -INFINITY;
      w.sum[r] = 0;
      for (uint32_t dim = w.lane; dim < a.v.head_dim; dim += kWarpThreads)
        w.shared.outputs[w.warp][r][dim] = 0;
    }
    if (thread < Rows) load_row(a, tile, thread, w.shared);
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static void attend_blocks(Thread& cuda, Warp& w, const AttendTile& tile) {
    for_each_block(w.part, tile.split, w.a.split_blocks, w.warp, kWarps, least_seen(w.shared, tile),
                   [&](uint64_t block, uint64_t unseen) { attend_block(cuda, w, block, unseen); });
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static void attend_block(Thread& cuda, Warp& w, uint64_t block,
                                              uint64_t unseen) {
    const uint8_t* bytes =
        w.part.blocks + (w.kv_head * w.part.block_count + block) * w.a.k.block_bytes;
    int32_t products[Rows][2];
    multiply_keys(w, bytes, products);
    make_weights(cuda, w, bytes, block * kBlockTokens, unseen, products);
    cuda.sync_warp(kWeightsWritten);
    multiply_values(w, bytes);
    cuda.sync_warp(kWeightsUsed);
  }

  POLYKV_HOST_DEVICE static void multiply_keys(const Warp& w, const uint8_t* bytes,
                                               int32_t (&products)[Rows][2]) {
    switch (w.a.k.bits) {
      case 4:
        return multiply_keys<4>(w, bytes, products);
      case 5:
        return multiply_keys<5>(w, bytes, products);
      case 6:
        return multiply_keys<6>(w, bytes, products);
      default:
        return multiply_keys8(w, bytes, products);
    }
  }

  POLYKV_HOST_DEVICE static void multiply(const Factors& factors, LevelPair levels, int32_t& high,
                                          int32_t& low) {
    high = dot4(levels.first, factors.words[0], high);
    low = dot4(levels.first, factors.words[1], low);
    high = dot4(levels.second, factors.words[2], high);
    low = dot4(levels.second, factors.words[3], low);
  }

  template <uint32_t Bits>
  POLYKV_HOST_DEVICE static void multiply_keys(const Warp& w, const uint8_t* bytes,
                                               int32_t (&products)[Rows][2]) {
    int32_t high[Rows][2] = {};
    int32_t low[Rows][2] = {};
    const uint32_t dims = w.a.k.head_dim;
    for (uint32_t dim = 0; dim < dims; dim += kPieceDims) {
      KPiece<Bits> pieces[2];
      POLYKV_UNROLL
      for (uint32_t i = 0; i < 2; ++i)
        pieces[i] = KPiece<Bits>::load(bytes + w.a.k.codes, w.lane + i * kWarpThreads, dim, dims);
      POLYKV_UNROLL
      for (uint32_t half = 0; half < 2; ++half) {
        const LevelPair levels[2] = {pieces[0].levels(w.a.k.levels, half),
                                     pieces[1].levels(w.a.k.levels, half)};
        POLYKV_UNROLL
        for (uint32_t r = 0; r < Rows; ++r) {
          const Factors factors = w.shared.queries[r][dim / 8 + half];
          POLYKV_UNROLL
          for (uint32_t i = 0; i < 2; ++i) multiply(factors, levels[i], high[r][i], low[r][i]);
        }
      }
    }
    POLYKV_UNROLL
    for (uint32_t r = 0; r < Rows; ++r) {
      products[r][0] = high[r][0] * 256 + low[r][0];
      products[r][1] = high[r][1] * 256 + low[r][1];
    }
  }

  POLYKV_HOST_DEVICE static void multiply_keys8(const Warp& w, const uint8_t* bytes,
                                                int32_t (&products)[Rows][2]) {
    int32_t high[Rows][2] = {};
    int32_t low[Rows][2] = {};
    const uint8_t* codes = bytes + w.a.k.codes + w.lane * 4;
    for (uint32_t quad = 0; quad < w.a.k.head_dim / 4; ++quad) {
      POLYKV_UNROLL
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t levels =
            load_word(codes + (quad * kBlockTokens + i * kWarpThreads) * 4) ^ 0x80808080U;
        POLYKV_UNROLL
        for (uint32_t r = 0; r < Rows; ++r) {
          const uint32_t* words = &w.shared.queries[r][quad / 2].words[quad % 2 * 2];
          high[r][i] = dot4(levels, words[0], high[r][i]);
          low[r][i] = dot4(levels, words[1], low[r][i]);
        }
      }
    }
    POLYKV_UNROLL
    for (uint32_t r = 0; r < Rows; ++r) {
      products[r][0] = high[r][0] * 256 + low[r][0];
      products[r][1] = high[r][1] * 256 + low[r][1];
    }
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static void make_weights(Thread& cuda, Warp& w, const uint8_t* bytes,
                                              uint64_t start, uint64_t unseen,
                                              const int32_t (&products)[Rows][2]) {
    float k_gains[2];
    float v_gains[2];
    bool is_bad[2];
    POLYKV_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t slot = w.lane + i * kWarpThreads;
      const uint16_t k = reinterpret_cast<const uint16_t*>(bytes + w.a.k.gains)[slot];
      const uint16_t v = reinterpret_cast<const uint16_t*>(bytes + w.a.v.gains)[slot];
      // Negative, infinite or no number: no encoder writes that.
      is_bad[i] = k >= 0x7c00U || v >= 0x7c00U;
      k_gains[i] = from_f16(k);
      v_gains[i] = is_bad[i] ? 0.0F : from_f16(v);
    }
    const float most_gain = warp_maximum(cuda, fmaxf(v_gains[0], v_gains[1]));
    const float to_fixed = most_gain > 0 ? kFixedPointLimit / most_gain : 0.0F;
    POLYKV_UNROLL
    for (uint32_t r = 0; r < Rows; ++r) {
      float logits[2];
      POLYKV_UNROLL
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t slot = w.lane + i * kWarpThreads;
        const uint64_t token = start + slot;
        const bool is_seen = ((unseen >> slot) & 1U) == 0 && token >= w.part.first_token &&
                             token < w.part.end_token && token >= w.shared.first_seen[r];
        const float logit = static_cast<float>(products[r][i]) * w.shared.steps[r] * k_gains[i] +
                            w.shared.mean_logits[r];
        logits[i] = !is_seen ? -INFINITY : is_bad[i] ? INFINITY : capped(logit, w.a.rows.soft_cap);
      }
      const float block_maximum = warp_maximum(cuda, fmaxf(logits[0], logits[1]));
      // Whether any token is seen is the same for all lanes.
      const bool sees_any = block_maximum > -INFINITY;
      const float maximum = fmaxf(w.maximum[r], block_maximum);
      const float old_factor = w.maximum[r] > -INFINITY ? exp_of(w.maximum[r] - maximum) : 0.0F;
      const float block_factor = sees_any ? exp_of(block_maximum - maximum) : 0.0F;
      float weights[2];
      uint32_t numbers = 0;
      POLYKV_UNROLL
      for (uint32_t i = 0; i < 2; ++i) {
        weights[i] = sees_any ? exp_of(logits[i] - block_maximum) : 0.0F;
        // Rounded up by half a low term, so that the high byte is the high term.
        const auto number = static_cast<int32_t>(rintf(weights[i] * v_gains[i] * to_fixed));
        numbers |= (static_cast<uint32_t>(number + 128) & 0xffffU) << (16 * i);
      }
      w.sum[r] = w.sum[r] * old_factor + (weights[0] + weights[1]) * block_factor;
      w.maximum[r] = maximum;
      w.old_factor[r] = old_factor;
      w.new_factor[r] = block_factor * most_gain / kFixedPointLimit;
      put_weights(cuda, w, r, numbers);
    }
  }

  /// numbers: of a lane's two tokens, plus 128. Words are in the order of V's levels, a pair of quads
  /// [first high, first low, second high, second low]; with 8 bits a quad [high, low].
  template <typename Thread>
  POLYKV_HOST_DEVICE static void put_weights(Thread& cuda, const Warp& w, uint32_t row,
                                             uint32_t numbers) {
    const bool is_wide = w.a.v.bits == 8;
    const uint32_t partner = is_wide ? 16 : 1;
    const uint32_t other = cuda.shuffle_xor(numbers, partner);
    const bool is_second = (w.lane & partner) != 0;  // it makes the low terms' word
    const uint32_t first_numbers = is_second ? other : numbers;
    const uint32_t second_numbers = is_second ? numbers : other;
    // Tokens in the order l, l + 32, l + 16, l + 48 with 8 bits, else l, l + 1, l + 32, l + 33.
    const uint32_t selector =
        is_wide ? (is_second ? 0x6420U : 0x7531U) : (is_second ? 0x6240U : 0x7351U);
    uint32_t word = byte_perm(first_numbers, second_numbers, selector);
    if (is_second) word ^= 0x80808080U;  // a low term is its byte minus 128
    const uint32_t place = is_wide ? w.lane % 16 * 2 : w.lane % 16 / 2 * 4 + w.lane / 16 * 2;
    w.shared.weights[w.warp][row][place / 4].words[place % 4 + (is_second ? 1 : 0)] = word;
  }

  POLYKV_HOST_DEVICE static void multiply_values(const Warp& w, const uint8_t* bytes) {
    switch (w.a.v.bits) {
      case 3:
        return multiply_values<3>(w, bytes);
      case 4:
        return multiply_values<4>(w, bytes);
      case 5:
        return multiply_values<5>(w, bytes);
      default:
        return multiply_values8(w, bytes);
    }
  }

  template <uint32_t Bits>
  POLYKV_HOST_DEVICE static void multiply_values(const Warp& w, const uint8_t* bytes) {
    const uint32_t dims = w.a.v.head_dim;
    for (uint32_t dim = w.lane; dim < dims; dim += kWarpThreads) {
      int32_t high[Rows] = {};
      int32_t low[Rows] = {};
      POLYKV_UNROLL
      for (uint32_t group = 0; group < kTokenQuads / kGroupQuads; ++group) {
        const auto packed = VGroup<Bits>::load(bytes + w.a.v.codes, group, dim, dims);
        POLYKV_UNROLL
        for (uint32_t pair = 0; pair < kGroupQuads / 2; ++pair) {
          const LevelPair levels = packed.levels(w.a.v.levels, pair);
          POLYKV_UNROLL
          for (uint32_t r = 0; r < Rows; ++r)
            multiply(w.shared.weights[w.warp][r][group * 4 + pair], levels, high[r], low[r]);
        }
      }
      add_products(w, dim, high, low);
    }
  }

  POLYKV_HOST_DEVICE static void multiply_values8(const Warp& w, const uint8_t* bytes) {
    const uint32_t dims = w.a.v.head_dim;
    for (uint32_t dim = w.lane; dim < dims; dim += kWarpThreads) {
      int32_t high[Rows] = {};
      int32_t low[Rows] = {};
      POLYKV_UNROLL
      for (uint32_t quad = 0; quad < kTokenQuads; ++quad) {
        const uint32_t levels = load_word(bytes + w.a.v.codes + (quad * dims + dim) * 4);
        POLYKV_UNROLL
        for (uint32_t r = 0; r < Rows; ++r) {
          const uint32_t* words = &w.shared.weights[w.warp][r][quad / 2].words[quad % 2 * 2];
          high[r] = dot4(levels, words[0], high[r]);
          low[r] = dot4(levels, words[1], low[r]);
        }
      }
      add_products(w, dim, high, low);
    }
  }

  POLYKV_HOST_DEVICE static void add_products(const Warp& w, uint32_t dim,
                                              const int32_t (&high)[Rows],
                                              const int32_t (&low)[Rows]) {
    POLYKV_UNROLL
    for (uint32_t r = 0; r < Rows; ++r) {
      float& output = w.shared.outputs[w.warp][r][dim];
      output =
          output * w.old_factor[r] + static_cast<float>(high[r] * 256 + low[r]) * w.new_factor[r];
    }
  }
};

}  // namespace polykv::cuda
