// What the kernels of attention share: which rows ask, which tokens they ask about, where partial results lie.
//
// Rows: one for each query of each head, [head, query]; those of the heads that read one kv_head are neighbours, so they
// are rows [kv_head * group_rows, (kv_head + 1) * group_rows). Tokens: runs of segments of one document (parts), in one launch all of one
// profile. Splits: a part's blocks are cut into splits, each a thread block's work, whose partial results
// are joined by their log-sum-exps.
//
// Workspace, in this order:  words   u32 [row, k_head_dim / 4, 2]         queries as fixed-point numbers
//                            rows    RowScale [row]
//                            means   f32 [part, row]                       logits of the keys' means
//                            states  SplitState [row, split]
//                            outputs f32 [row, split, v_head_dim]          not divided; those of packed splits still rotated
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_call.h"
#include "kernels/cuda/tensor_arguments.h"
#include "kernels/cuda/thread.h"

namespace polykv::cuda {

inline constexpr uint32_t kMaxParts = 64;     // of one launch
inline constexpr uint32_t kMostTileRows = 8;  // rows that share what is unpacked
// Of the kernel for the tensor cores, and where it has several tiles that share what is unpacked.
inline constexpr uint32_t kTileRows = 16;
inline constexpr uint32_t kLargeTileRows = 64;
inline constexpr uint32_t kMostLargeTileDims = 128;  // head_dim
inline constexpr uint32_t kPlainTileRows = 4;        // of the kernel for rows that are not packed

/// Fixed-point numbers have two int8 terms, 256 high + low: the largest.
inline constexpr float kFixedPointLimit = 127.0F * 256 + 127;

struct RowScale {
  float step;  // of the query's fixed-point numbers
};

/// A row's softmax over some tokens: sum of exp(logit - maximum).
struct SplitState {
  float maximum;  // minus infinity: no tokens
  float sum;
};

/// A run of tokens of one segment.
struct AttendPart {
  const uint8_t* blocks;
  uint64_t block_count;     // of one kv_head, the stride
  uint64_t document_token;  // which token of the document the segment's first is
  uint64_t first_token;     // counted from the segment's first
  uint64_t end_token;
  const float* means;  // [kv_head, k_head_dim]
  const uint32_t* exact_tokens;
  const uint16_t* exact_k;
  const uint16_t* exact_v;
  uint32_t exact_count;
  uint32_t exact_capacity;
  float k_unit;  // of gains; of paper-k8v3, what K's codes are multiplied by
  float v_unit;
  float exact_k_unit;
  float exact_v_unit;
  uint32_t
      first_split;  // its splits follow each other; those of exact rows have a count of their own
  uint32_t split_count;
};

struct AttendRows {
  uint32_t group_rows;           // rows of a kv_head
  uint32_t query_count;          // queries; row r of a kv_head is query r % query_count
  float soft_cap;                // 0: none
  const uint64_t* first_tokens;  // [query], of the document; null: all are seen

  /// The first token of a part's segment that a row sees.
  POLYKV_HOST_DEVICE uint64_t first_seen(const AttendPart& part, uint32_t row) const {
    if (first_tokens == nullptr) return 0;
    const uint64_t first = first_tokens[row % query_count];
    return first <= part.document_token ? 0 : first - part.document_token;
  }
};

struct AttendWorkspace {
  uint32_t* words;
  RowScale* rows;
  float* mean_logits;
  SplitState* states;
  float* outputs;
  uint32_t row_count;
  uint32_t split_count;  // of a row, packed ones first

  POLYKV_HOST_DEVICE uint64_t place(uint64_t row, uint32_t split) const {
    return row * split_count + split;
  }
};

/// The queries as the caller has them.
struct AskedRows {
  const void* q;
  Dtype dtype;
  QueryStrides strides;
  float scale;
  uint32_t query_count;

  /// row: of all heads.
  POLYKV_HOST_DEVICE float at(uint64_t row, uint32_t dim) const {
    const auto query = static_cast<int64_t>(row % query_count);
    const auto head = static_cast<int64_t>(row / query_count);
    return load_element(q, dtype, query * strides.query + head * strides.head + dim * strides.dim) *
           scale;
  }
};

/// A thread block's share: some rows of a kv_head, and a split of a part.
struct AttendTile {
  uint32_t kv_head;
  uint32_t part;       // of the launch
  uint32_t split;      // of the part
  uint32_t place;      // of a row's partial results
  uint32_t first_row;  // counted from the kv_head's first
  uint32_t row_count;  // at most `rows`
  uint64_t row;        // the first one, counted from all rows' first

  /// Arguments: of a kernel that attends; a grid is [kv_head, split, tile].
  template <typename Arguments>
  POLYKV_HOST_DEVICE static AttendTile of(const Arguments& a, uint64_t block_index, uint32_t rows) {
    const auto index = static_cast<uint32_t>(block_index);
    const uint32_t split = index / a.tile_count % a.split_count;
    AttendTile tile{};
    tile.kv_head = index / a.tile_count / a.split_count;
    while (split >= a.parts[tile.part].first_split + a.parts[tile.part].split_count) ++tile.part;
    tile.split = split - a.parts[tile.part].first_split;
    tile.place = a.first_place + split;
    tile.first_row = index % a.tile_count * rows;
    const uint32_t left = a.rows.group_rows - tile.first_row;
    tile.row_count = left < rows ? left : rows;
    tile.row = uint64_t{tile.kv_head} * a.rows.group_rows + tile.first_row;
    return tile;
  }
};

/// What prepare_queries_kernel.h found out about row r of a tile, and which tokens it sees, into Shared's steps,
/// mean_logits and first_seen. A row that is not there sees none.
template <typename Arguments, typename Shared>
POLYKV_HOST_DEVICE inline void load_row(const Arguments& a, const AttendTile& tile, uint32_t r,
                                        Shared& shared) {
  const AttendPart& part = a.parts[tile.part];
  const bool exists = r < tile.row_count;
  const uint64_t row = tile.row + r;
  const uint64_t mean = uint64_t{a.first_part + tile.part} * a.workspace.row_count + row;
  shared.steps[r] = exists ? a.workspace.rows[row].step * part.k_unit : 0.0F;
  shared.mean_logits[r] = exists ? a.workspace.mean_logits[mean] : 0.0F;
  shared.first_seen[r] = exists ? a.rows.first_seen(part, tile.first_row + r) : ~uint64_t{0};
}

/// The first token that any row of a tile sees.
template <typename Shared>
POLYKV_HOST_DEVICE inline uint64_t least_seen(const Shared& shared, const AttendTile& tile) {
  uint64_t least = shared.first_seen[0];
  for (uint32_t r = 1; r < tile.row_count; ++r) {
    if (shared.first_seen[r] < least) least = shared.first_seen[r];
  }
  return least;
}

/// Tokens' logits as the model's soft-cap has them; one that is no number becomes an infinity, which
/// makes the row's result NaN.
POLYKV_HOST_DEVICE inline float capped(float logit, float soft_cap) {
  if (!(fabsf(logit) <= 3.40282347e38F)) return INFINITY;
  return soft_cap > 0 ? soft_cap * tanhf(logit / soft_cap) : logit;
}

/// e^x for x <= 0; results below the least normal number are 0.
POLYKV_HOST_DEVICE inline float exp_of(float x) {
#ifdef __CUDA_ARCH__
  // exp2f() takes three more instructions for the sake of those.
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504F));
  return result;
#else
  return exp2f(x * 1.44269504F);
#endif
}

template <typename Thread>
POLYKV_HOST_DEVICE inline float warp_sum(Thread& cuda, float value) {
  POLYKV_UNROLL
  for (uint32_t mask = 16; mask > 0; mask /= 2) value += cuda.shuffle_xor(value, mask);
  return value;
}

template <typename Thread>
POLYKV_HOST_DEVICE inline float warp_maximum(Thread& cuda, float value) {
  POLYKV_UNROLL
  for (uint32_t mask = 16; mask > 0; mask /= 2) value = fmaxf(value, cuda.shuffle_xor(value, mask));
  return value;
}

/// The dims of a row's outputs that are at hand.
struct OutputDims {
  uint32_t head_dim;
  uint32_t first;
  uint32_t count;
};

/// Joins what the warps of a thread block saw of its rows, in Shared's states[warp][row] and outputs[warp][row][dim], and
/// stores it as the tile's partial results; outputs times v_unit.
template <uint32_t Warps, typename Shared>
POLYKV_HOST_DEVICE inline void join_warps(const Shared& shared, uint32_t thread,
                                          const AttendTile& tile, const OutputDims& dims,
                                          float v_unit, const AttendWorkspace& workspace) {
  for (uint32_t r = 0; r < tile.row_count; ++r) {
    float maximum = -INFINITY;
    for (uint32_t i = 0; i < Warps; ++i) maximum = fmaxf(maximum, shared.states[i][r].maximum);
    float factors[Warps];
    float sum = 0;
    POLYKV_UNROLL
    for (uint32_t i = 0; i < Warps; ++i) {
      const SplitState state = shared.states[i][r];
      factors[i] = state.maximum > -INFINITY ? exp_of(state.maximum - maximum) : 0.0F;
      sum += state.sum * factors[i];
    }
    const uint64_t place = workspace.place(tile.row + r, tile.place);
    for (uint32_t dim = thread; dim < dims.count; dim += Warps * kWarpThreads) {
      float output = 0;
      POLYKV_UNROLL
      for (uint32_t i = 0; i < Warps; ++i) output += shared.outputs[i][r][dim] * factors[i];
      workspace.outputs[place * dims.head_dim + dims.first + dim] = output * v_unit;
    }
    if (thread == 0 && dims.first == 0) workspace.states[place] = {maximum, sum};
  }
}

/// The index of the first of ascending numbers that is not below `least`.
POLYKV_HOST_DEVICE inline uint32_t lower_bound(const uint32_t* numbers, uint32_t count,
                                               uint64_t least) {
  uint32_t low = 0;
  while (low < count) {
    const uint32_t middle = low + (count - low) / 2;
    if (numbers[middle] < least) {
      low = middle + 1;
    } else {
      count = middle;
    }
  }
  return low;
}

/// body(block, unseen) for every `step`th block of a part's split from its `first` on, but for those that end before
/// least_seen. unseen: bits of the block's tokens that no row sees there, because exact rows are attended to apart.
template <typename Body>
POLYKV_HOST_DEVICE inline void for_each_block(const AttendPart& part, uint32_t split,
                                              uint32_t split_blocks, uint32_t first, uint32_t step,
                                              uint64_t least_seen, const Body& body) {
  uint64_t block = part.first_token / kBlockTokens + uint64_t{split} * split_blocks;
  uint64_t end = (part.end_token - 1) / kBlockTokens + 1;
  if (end - block > split_blocks) end = block + split_blocks;
  block += first;
  uint32_t exact = lower_bound(part.exact_tokens, part.exact_count, block * kBlockTokens);
  for (; block < end; block += step) {
    const uint64_t start = block * kBlockTokens;
    uint64_t unseen = 0;
    while (exact < part.exact_count && part.exact_tokens[exact] < start) ++exact;
    for (; exact < part.exact_count && part.exact_tokens[exact] < start + kBlockTokens; ++exact)
      unseen |= uint64_t{1} << (part.exact_tokens[exact] - start);
    if (start + kBlockTokens > least_seen) body(block, unseen);
  }
}

}  // namespace polykv::cuda
