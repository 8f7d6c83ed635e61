// Attention of tiles of 16 rows to packed blocks by the tensor cores' int8 products, for more rows than
// attend_packed_kernel.h is made for. The same numbers: keys' levels times the queries' two int8 terms, values' levels
// times the weights' two.
//
// Products are of fragments (kernels/cuda/thread.h), and nothing is moved between lanes for them:
//
//   keys    A: 16 rows x 32 dims of queries   B: 32 dims x 8 tokens. Lane 4 i + s has a whole piece of 16 dims, number s of
//           four, of token i; its words are what the lane holds in two products, so dims are not in order, which is
//           all the same to a sum as long as queries' words lie alike
//   values  A: 16 rows x 32 tokens of weights  B: 32 tokens x 8 dims. Lane 4 i + s unpacks one word, of quads 2 s and 2 s + 1 of a
//           group, of dim i. The eight tokens in it are the ones whose logits the products of keys left in this
//           very lane, because the groups of 8 tokens were taken in that order (first_token)
//
// Two shapes. RowWarps 1: four warps take blocks in turn and unpack them for themselves, one tile. RowWarps 4: four warps
// have a tile each and unpack every block together, into shared memory in the order of fragments.
//
// Bytes per token and kv_head: the packed ones, once for each 16 or 64 rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/attend_fragments.h"
#include "kernels/cuda/attend_packed_kernel.h"

namespace polykv::cuda {

/// MaxDim: the largest head_dim of K and V.
template <uint32_t MaxDim, uint32_t RowWarps>
struct AttendTiledKernel {
  using Arguments = AttendPackedArguments;
  static constexpr uint32_t kWarps = 4;
  static constexpr uint32_t kThreads = kWarps * kWarpThreads;
  static constexpr uint32_t kMinBlocks = MaxDim > 128 ? 2 : 3;
  static constexpr uint32_t kRows = RowWarps * kTileRows;
  static constexpr bool kIsShared = RowWarps > 1;
  static_assert(RowWarps == 1 || RowWarps == kWarps);
  enum Sync : uint32_t { kQueriesLoaded = 1, kUnpacked, kUsed, kRead, kWarpsDone };

  static constexpr uint32_t kStepDims = 32;               // of a product
  static constexpr uint32_t kRoundDims = 4 * kPieceDims;  // two products
  static constexpr uint32_t kSteps = MaxDim / kStepDims;
  static constexpr uint32_t kDimGroups = MaxDim / 8;
  static constexpr uint32_t kHalfDims = 128;  // of V, at a time in shared memory

  /// Of RowWarps 1: V's levels, of which a lane reads what it wrote, and in the end the warps' results.
  struct Own {
    SplitState states[kWarps][kTileRows];
    union {
      Words2 values[kWarps][kHalfDims / 8][kQuadGroups][kWarpThreads];
      float outputs[kWarps][kTileRows][kHalfDims];
    };
  };
  /// Of RowWarps 4: a block's levels, [.., lane].
  struct Unpacked {
    Words2 keys[kTokenGroups][kSteps][kWarpThreads];
    Words2 values[kDimGroups][kQuadGroups][kWarpThreads];
  };
  struct Shared {
    Words4 queries[RowWarps][kSteps][2][kWarpThreads];  // [tile, product, term, lane]
    float steps[kRows];
    float mean_logits[kRows];
    uint64_t first_seen[kRows];
    std::conditional_t<kIsShared, Unpacked, Own> rest;
  };

  /// A thread's place, and the softmax and outputs of two rows, lane / 4 and that + 8, of its tile: of every
  /// eighth dim from 2 (lane % 4) on two, [dim group][first row's two, second row's two].
  struct Warp {
    const Arguments& a;
    Shared& shared;
    const AttendPart& part;
    uint32_t warp;
    uint32_t lane;
    uint32_t kv_head;
    uint32_t tile;         // of the thread block's: in shared memory
    bool has_second_rows;  // those from 8 on
    float maximum[2];
    float sum[2];
    float outputs[kDimGroups][4];
  };
  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    const AttendTile tile = AttendTile::of(a, cuda.block_index(), kRows);
    const uint32_t warp = cuda.thread_index() / kWarpThreads;
    Warp w{a,
           cuda.template shared<Shared>(),
           a.parts[tile.part],
           warp,
           cuda.thread_index() % kWarpThreads,
           tile.kv_head,
           kIsShared ? warp : 0,
           tile.row_count > (kIsShared ? warp * kTileRows : 0) + 8,
           {-INFINITY, -INFINITY},
           {},
           {}};
    load_queries(w, tile);
    cuda.sync_threads(kQueriesLoaded);
    attend_blocks(cuda, w, tile);
    POLYKV_UNROLL
    for (uint32_t r = 0; r < 2; ++r) w.sum[r] = quarter_sum(cuda, w.sum[r]);
    if constexpr (kIsShared) {
      store_rows(w, tile);
    } else {
      join(cuda, w, tile);
    }
  }

 private:
  /// The four lanes that share rows.
  template <typename Thread>
  POLYKV_HOST_DEVICE static float quarter_sum(Thread& cuda, float value) {
    value += cuda.shuffle_xor(value, 1);
    return value + cuda.shuffle_xor(value, 2);
  }
  template <typename Thread>
  POLYKV_HOST_DEVICE static float quarter_maximum(Thread& cuda, float value) {
    value = fmaxf(value, cuda.shuffle_xor(value, 1));
    return fmaxf(value, cuda.shuffle_xor(value, 2));
  }

  POLYKV_HOST_DEVICE static void load_queries(Warp& w, const AttendTile& tile) {
    const Arguments& a = w.a;
    const uint32_t words = a.k.head_dim / 4;
    const uint32_t thread = w.warp * kWarpThreads + w.lane;
    // A pair of words at a time: those of a product, one in either half of its dims.
    for (uint32_t i = thread; i < kRows * kSteps * 4; i += kThreads) {
      const uint32_t r = i / (kSteps * 4);
      const uint32_t pair = i % (kSteps * 4);
      const uint32_t piece = pair / 2;
      const uint32_t step = piece / 4 * 2 + pair % 2;
      const uint32_t lane = r % 8 * 4 + piece % 4;
      POLYKV_UNROLL
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t word = 2 * pair + half;
        // Rows and dims that are not there are zeros.
        const bool exists = r < tile.row_count && word < words;
        const uint32_t* terms = a.workspace.words + ((tile.row + r) * words + word) * 2;
        const uint32_t slot = r % kTileRows / 8 + 2 * half;
        POLYKV_UNROLL
        for (uint32_t term = 0; term < 2; ++term)
          w.shared.queries[r / kTileRows][step][term][lane].words[slot] = exists ? terms[term] : 0;
      }
    }
    for (uint32_t r = thread; r < kRows; r += kThreads) load_row(a, tile, r, w.shared);
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static void attend_blocks(Thread& cuda, Warp& w, const AttendTile& tile) {
    const auto attend = [&](uint64_t block, uint64_t unseen) {
      const uint8_t* bytes =
          w.part.blocks + (w.kv_head * w.part.block_count + block) * w.a.k.block_bytes;
      if constexpr (kIsShared) {
        unpack(w, bytes);
        cuda.sync_threads(kUnpacked);
      }
      attend_block(cuda, w, bytes, block * kBlockTokens, unseen);
      if constexpr (kIsShared) cuda.sync_threads(kUsed);
    };
    for_each_block(w.part, tile.split, w.a.split_blocks, kIsShared ? 0 : w.warp,
                   kIsShared ? 1 : kWarps, least_seen(w.shared, tile), attend);
  }

  /// A warp's quarter of a block.
  POLYKV_HOST_DEVICE static void unpack(const Warp& w, const uint8_t* bytes) {
    Unpacked& unpacked = w.shared.rest;
    with_k_bits(w.a.k.bits, [&](auto bits) {
      for (uint32_t group = w.warp; group < kTokenGroups; group += kWarps) {
        const uint32_t token = first_token(group) + w.lane / 4;
        for (uint32_t dim = 0; dim < w.a.k.head_dim; dim += kRoundDims) {
          const Words4 words = key_words<bits>(w.a.k, bytes, token, dim / kPieceDims + w.lane % 4);
          const uint32_t step = dim / kStepDims;
          unpacked.keys[group][step][w.lane] = {{words.words[0], words.words[1]}};
          unpacked.keys[group][step + 1][w.lane] = {{words.words[2], words.words[3]}};
        }
      }
    });
    with_v_bits(w.a.v.bits, [&](auto bits) {
      for (uint32_t group = w.warp; group * 8 < w.a.v.head_dim; group += kWarps) {
        POLYKV_UNROLL
        for (uint32_t j = 0; j < kQuadGroups; ++j)
          unpacked.values[group][j][w.lane] =
              value_words<bits>(w.a.v, bytes, j, w.lane % 4, group * 8 + w.lane / 4);
      }
    });
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static void attend_block(Thread& cuda, Warp& w, const uint8_t* bytes,
                                              uint64_t start, uint64_t unseen) {
    // Of two rows, two tokens of each group: [group][first row's two, second row's two].
    int32_t products[kTokenGroups][4];
    if constexpr (kIsShared) {
      multiply_keys(cuda, w, products, [&](uint32_t group, uint32_t dim) {
        const auto& keys = w.shared.rest.keys[group];
        const Words2 first = keys[dim / kStepDims][w.lane];
        const Words2 second = keys[dim / kStepDims + 1][w.lane];
        return Words4{{first.words[0], first.words[1], second.words[0], second.words[1]}};
      });
    } else {
      with_k_bits(w.a.k.bits, [&](auto bits) {
        multiply_keys(cuda, w, products, [&](uint32_t group, uint32_t dim) {
          return key_words<bits>(w.a.k, bytes, first_token(group) + w.lane / 4,
                                 dim / kPieceDims + w.lane % 4);
        });
      });
    }
    Weights weights;
    make_weights(cuda, w, bytes, start, unseen, products, weights);
    if constexpr (kIsShared) {
      multiply_values(cuda, w, weights, 0, [&](uint32_t group, uint32_t j) {
        return w.shared.rest.values[group][j][w.lane];
      });
    } else {
      auto& values = w.shared.rest.values[w.warp];
      POLYKV_UNROLL
      for (uint32_t first = 0; first < MaxDim; first += kHalfDims) {
        // Through shared memory, so that the code of unpacking is not there once for each register of outputs.
        with_v_bits(w.a.v.bits, [&](auto bits) {
          for (uint32_t i = 0; i < kHalfDims / 8 && first + i * 8 < w.a.v.head_dim; ++i) {
            POLYKV_UNROLL
            for (uint32_t j = 0; j < kQuadGroups; ++j)
              values[i][j][w.lane] =
                  value_words<bits>(w.a.v, bytes, j, w.lane % 4, first + i * 8 + w.lane / 4);
          }
        });
        multiply_values(cuda, w, weights, first / 8, [&](uint32_t group, uint32_t j) {
          return values[group - first / 8][j][w.lane];
        });
      }
    }
  }

  /// words_of(group of tokens, first of 64 dims)
  template <typename Thread, typename WordsOf>
  POLYKV_HOST_DEVICE static void multiply_keys(Thread& cuda, const Warp& w,
                                               int32_t (&products)[kTokenGroups][4],
                                               const WordsOf& words_of) {
    // Two groups at a time, which share the queries' fragments.
    POLYKV_UNROLL
    for (uint32_t group = 0; group < kTokenGroups; group += 2) {
      int32_t sums[2][2][4] = {};  // [group][term]
      for (uint32_t dim = 0; dim < w.a.k.head_dim; dim += kRoundDims) {
        const Words4 keys[2] = {words_of(group, dim), words_of(group + 1, dim)};
        POLYKV_UNROLL
        for (uint32_t half = 0; half < 2; ++half) {
          POLYKV_UNROLL
          for (uint32_t term = 0; term < 2; ++term) {
            const Words4 queries = w.shared.queries[w.tile][dim / kStepDims + half][term][w.lane];
            POLYKV_UNROLL
            for (uint32_t i = 0; i < 2; ++i)
              cuda.multiply_fragments(sums[i][term], queries.words, keys[i].words[2 * half],
                                      keys[i].words[2 * half + 1]);
          }
        }
      }
      POLYKV_UNROLL
      for (uint32_t i = 0; i < 2; ++i) {
        POLYKV_UNROLL
        for (uint32_t j = 0; j < 4; ++j)
          products[group + i][j] = sums[i][0][j] * 256 + sums[i][1][j];
      }
    }
  }

  /// Which tokens of the block a row sees: bit i for token i of those from this lane's first column on.
  POLYKV_HOST_DEVICE static uint64_t seen_by(const Warp& w, uint32_t row, uint64_t start,
                                             uint64_t unseen) {
    const auto from = [](uint64_t first) { return first < 64 ? ~uint64_t{0} << first : 0; };
    uint64_t seen = ~unseen;
    if (w.part.first_token > start) seen &= from(w.part.first_token - start);
    if (w.part.end_token - start < 64) seen &= ~from(w.part.end_token - start);
    const uint64_t first = w.shared.first_seen[row];
    if (first > start) seen &= from(first - start);
    return seen >> (w.lane % 4 * 2);
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static void make_weights(Thread& cuda, Warp& w, const uint8_t* bytes,
                                              uint64_t start, uint64_t unseen,
                                              const int32_t (&products)[kTokenGroups][4],
                                              Weights& weights) {
    // Two gains a word. Those of keys are read where they are used: registers are short.
    const auto gains_of = [&](uint32_t gains, uint32_t group) {
      return load_word(bytes + gains + (first_token(group) + w.lane % 4 * 2) * 2);
    };
    uint32_t v_gains[kTokenGroups];
    uint32_t any_bad = 0;
    POLYKV_UNROLL
    for (uint32_t group = 0; group < kTokenGroups; ++group) {
      v_gains[group] = gains_of(w.a.v.gains, group);
      any_bad |= bad_gains(v_gains[group]) | bad_gains(gains_of(w.a.k.gains, group));
    }
    // Bits 2 group and 2 group + 1: a bad token's logit is infinite, so that rows that see it come out as NaN.
    uint32_t bad_tokens = 0;
    if (any_bad != 0) {
      POLYKV_UNROLL
      for (uint32_t group = 0; group < kTokenGroups; ++group) {
        const uint32_t bad_v = bad_gains(v_gains[group]);
        const uint32_t bad = bad_v | bad_gains(gains_of(w.a.k.gains, group));
        bad_tokens |= ((bad >> 15 & 1U) | (bad >> 30 & 2U)) << (2 * group);
        v_gains[group] &= ~((bad_v >> 15) * 0xffffU);
      }
    }
    float most_gain = 0;
    POLYKV_UNROLL
    for (uint32_t group = 0; group < kTokenGroups; ++group)
      most_gain = fmaxf(most_gain, fmaxf(half_of(v_gains[group], 0), half_of(v_gains[group], 1)));
    most_gain = quarter_maximum(cuda, most_gain);
    const float to_fixed = most_gain > 0 ? kFixedPointLimit / most_gain : 0.0F;
    POLYKV_UNROLL
    for (uint32_t r = 0; r < 2; ++r) {
      if (r == 1 && !w.has_second_rows) {
        leave_out(weights, r);
        break;
      }
      const uint32_t row = w.tile * kTileRows + w.lane / 4 + 8 * r;
      const float step = w.shared.steps[row];
      const float mean_logit = w.shared.mean_logits[row];
      const uint64_t seen = seen_by(w, row, start, unseen);
      float logits[kTokenGroups][2];
      float block_maximum = -INFINITY;
      POLYKV_UNROLL
      for (uint32_t group = 0; group < kTokenGroups; ++group) {
        const uint32_t k_gains = gains_of(w.a.k.gains, group);
        POLYKV_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
          const float logit =
              static_cast<float>(products[group][2 * r + i]) * (step * half_of(k_gains, i)) +
              mean_logit;
          logits[group][i] = capped(logit, 0);
        }
      }
      if (bad_tokens != 0) {
        POLYKV_UNROLL
        for (uint32_t i = 0; i < 2 * kTokenGroups; ++i) {
          if ((bad_tokens >> i & 1U) != 0) logits[i / 2][i % 2] = INFINITY;
        }
      }
      if (w.a.rows.soft_cap > 0) {
        POLYKV_UNROLL
        for (uint32_t group = 0; group < kTokenGroups; ++group) {
          POLYKV_UNROLL
          for (uint32_t i = 0; i < 2; ++i)
            logits[group][i] = capped(logits[group][i], w.a.rows.soft_cap);
        }
      }
      POLYKV_UNROLL
      for (uint32_t group = 0; group < kTokenGroups; ++group) {
        POLYKV_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
          if ((seen >> (first_token(group) + i) & 1U) == 0) logits[group][i] = -INFINITY;
          block_maximum = fmaxf(block_maximum, logits[group][i]);
        }
      }
      block_maximum = quarter_maximum(cuda, block_maximum);
      const bool sees_any = block_maximum > -INFINITY;
      const float maximum = fmaxf(w.maximum[r], block_maximum);
      const float block_factor = sees_any ? exp_of(block_maximum - maximum) : 0.0F;
      weights.old_factor[r] = w.maximum[r] > -INFINITY ? exp_of(w.maximum[r] - maximum) : 0.0F;
      weights.new_factor[r] = block_factor * most_gain / kFixedPointLimit;
      const float reference = sees_any ? block_maximum : 0.0F;
      uint32_t numbers[kTokenGroups];
      float sum = 0;
      POLYKV_UNROLL
      for (uint32_t group = 0; group < kTokenGroups; ++group) {
        float fixed[2];
        POLYKV_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
          const float weight = exp_of(logits[group][i] - reference);
          sum += weight;
          fixed[i] = weight * (half_of(v_gains[group], i) * to_fixed);
        }
        numbers[group] = two_numbers(fixed[0], fixed[1]);
      }
      w.sum[r] = w.sum[r] * weights.old_factor[r] + sum * block_factor;
      w.maximum[r] = maximum;
      put_weights(w.a.v.bits, r, numbers, weights);
    }
  }

  /// 128 dims. words_of(group of dims, group of quads)
  template <typename Thread, typename WordsOf>
  POLYKV_HOST_DEVICE static void multiply_values(Thread& cuda, Warp& w, const Weights& weights,
                                                 uint32_t first_group, const WordsOf& words_of) {
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kHalfDims / 8; ++i) {
      const uint32_t group = first_group + i;
      if (group * 8 >= w.a.v.head_dim) break;
      int32_t sums[2][4] = {};
      POLYKV_UNROLL
      for (uint32_t j = 0; j < kQuadGroups; ++j) {
        const Words2 values = words_of(group, j);
        POLYKV_UNROLL
        for (uint32_t term = 0; term < 2; ++term)
          cuda.multiply_fragments(sums[term], weights.words[j][term], values.words[0],
                                  values.words[1]);
      }
      POLYKV_UNROLL
      for (uint32_t place = 0; place < 4; ++place) {
        if (place == 2 && !w.has_second_rows) break;
        float& output = w.outputs[group][place];
        output = output * weights.old_factor[place / 2] +
                 static_cast<float>(sums[0][place] * 256 + sums[1][place]) *
                     weights.new_factor[place / 2];
      }
    }
  }

  /// Each warp has its own tile.
  POLYKV_HOST_DEVICE static void store_rows(const Warp& w, const AttendTile& tile) {
    POLYKV_UNROLL
    for (uint32_t r = 0; r < 2; ++r) {
      const uint32_t own = w.tile * kTileRows + w.lane / 4 + 8 * r;
      if (own >= tile.row_count) continue;
      const uint64_t place = w.a.workspace.place(tile.row + own, tile.place);
      if (w.lane % 4 == 0) w.a.workspace.states[place] = {w.maximum[r], w.sum[r]};
      float* outputs = w.a.workspace.outputs + place * w.a.v.head_dim;
      POLYKV_UNROLL
      for (uint32_t group = 0; group < kDimGroups; ++group) {
        POLYKV_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
          const uint32_t dim = group * 8 + w.lane % 4 * 2 + i;
          if (dim < w.a.v.head_dim) outputs[dim] = w.outputs[group][2 * r + i] * w.part.v_unit;
        }
      }
    }
  }

  /// All warps have the same tile.
  template <typename Thread>
  POLYKV_HOST_DEVICE static void join(Thread& cuda, Warp& w, const AttendTile& tile) {
    Own& own = w.shared.rest;
    POLYKV_UNROLL
    for (uint32_t r = 0; r < 2; ++r) {
      if (w.lane % 4 == 0) own.states[w.warp][w.lane / 4 + 8 * r] = {w.maximum[r], w.sum[r]};
    }
    POLYKV_UNROLL
    for (uint32_t first = 0; first < MaxDim; first += kHalfDims) {
      if (first >= w.a.v.head_dim) break;
      // Others' levels, or their results of the dims before, are where results come.
      cuda.sync_threads(kRead);
      POLYKV_UNROLL
      for (uint32_t i = 0; i < kHalfDims / 8 * 4; ++i) {
        const uint32_t r = i / 2 % 2;
        own.outputs[w.warp][w.lane / 4 + 8 * r][i / 4 * 8 + w.lane % 4 * 2 + i % 2] =
            w.outputs[first / 8 + i / 4][i % 4];
      }
      cuda.sync_threads(kWarpsDone);
      const uint32_t left = w.a.v.head_dim - first;
      join_warps<kWarps>(own, w.warp * kWarpThreads + w.lane, tile,
                         {w.a.v.head_dim, first, left < kHalfDims ? left : kHalfDims},
                         w.part.v_unit, w.a.workspace);
    }
  }
};

}  // namespace polykv::cuda
