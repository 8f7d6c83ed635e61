// Attention of a tile of rows to keys and values in fp32, a token at a time: exact rows, the blocks of `exact`, and those of
// paper-k8v3, whose levels of V are no integers. Keys and values are as they are, not centred, and not rotated but for
// V of paper-k8v3. Exact rows are a few in a part, and the two profiles are there for comparison: a warp takes a token
// at a time, a lane every 32nd dim, and sums of a logit go over the warp.
//
// Bytes per token and kv_head: those of its K and V, once for each tile of rows.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_arguments.h"
#include "kernels/cuda/thread.h"

namespace polykv::cuda {

enum class PlainRows : uint8_t { exact_rows, exact_blocks, paper_blocks };

struct AttendPlainArguments {
  AskedRows asked;
  PlainRows kind;
  Dtype source_dtype;  // of exact_blocks
  uint64_t block_bytes;
  uint64_t v_offset;      // of V's rows or codes in a block
  float paper_levels[8];  // of V, whose rotation is orthonormal here
  uint32_t k_head_dim;
  uint32_t v_head_dim;
  uint32_t tile_count;    // of a kv_head's rows
  uint32_t split_tokens;  // of blocks; a part's exact rows are one split
  AttendRows rows;
  AttendWorkspace workspace;
  uint32_t first_place;  // of the workspace's splits, where these begin
  uint32_t split_count;  // of these parts
  AttendPart parts[kMaxParts];
};

struct AttendPlainKernel {
  using Arguments = AttendPlainArguments;
  static constexpr uint32_t kRows = kPlainTileRows;
  static constexpr uint32_t kWarps = 4;
  static constexpr uint32_t kThreads = kWarps * kWarpThreads;
  static constexpr uint32_t kMinBlocks = 6;
  static constexpr uint32_t kLaneDims = kMaxDeviceHeadDim / kWarpThreads;
  enum Sync : uint32_t { kQueriesLoaded = 1, kWarpsDone };

  struct Shared {
    float queries[kRows][kMaxDeviceHeadDim];
    float outputs[kWarps][kRows][kMaxDeviceHeadDim];
    SplitState states[kWarps][kRows];
  };

  struct Warp {
    const Arguments& a;
    Shared& shared;
    const AttendPart& part;
    uint32_t warp;
    uint32_t lane;
    uint32_t kv_head;
    uint64_t first_seen[kRows];
    SplitState states[kRows];
  };

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    const AttendTile tile = AttendTile::of(a, cuda.block_index(), kRows);
    Warp w{a,
           cuda.template shared<Shared>(),
           a.parts[tile.part],
           cuda.thread_index() / kWarpThreads,
           cuda.thread_index() % kWarpThreads,
           tile.kv_head,
           {},
           {}};
    load_queries(w, tile);
    cuda.sync_threads(kQueriesLoaded);
    attend_tokens(cuda, w, tile.split);
    for (uint32_t r = 0; r < kRows; ++r) {
      if (w.lane == 0) w.shared.states[w.warp][r] = w.states[r];
    }
    cuda.sync_threads(kWarpsDone);
    join_warps<kWarps>(w.shared, w.warp * kWarpThreads + w.lane, tile,
                       {a.v_head_dim, 0, a.v_head_dim}, 1, a.workspace);
  }

 private:
  POLYKV_HOST_DEVICE static void load_queries(Warp& w, const AttendTile& tile) {
    const Arguments& a = w.a;
    for (uint32_t r = 0; r < kRows; ++r) {
      const bool exists = r < tile.row_count;
      w.states[r] = {-INFINITY, 0};
      w.first_seen[r] = exists ? a.rows.first_seen(w.part, tile.first_row + r) : ~uint64_t{0};
      for (uint32_t dim = w.warp * kWarpThreads + w.lane; dim < a.k_head_dim; dim += kThreads)
        w.shared.queries[r][dim] = exists ? a.asked.at(tile.row + r, dim) : 0.0F;
      for (uint32_t dim = w.lane; dim < a.v_head_dim; dim += kWarpThreads)
        w.shared.outputs[w.warp][r][dim] = 0;
    }
  }

  /// A token's rows as numbers of some dtype.
  struct StoredRows {
    const void* k_row;
    const void* v_row;
    Dtype dtype;
    float k_unit;
    float v_unit;

    POLYKV_HOST_DEVICE float k(uint32_t dim) const {
      return load_element(k_row, dtype, dim) * k_unit;
    }
    POLYKV_HOST_DEVICE float v(uint32_t dim) const {
      return load_element(v_row, dtype, dim) * v_unit;
    }
  };

  /// As codes of paper-k8v3.
  struct PaperRows {
    const Arguments& a;
    const uint8_t* block;
    uint32_t slot;
    float k_scale;
    float norm;

    POLYKV_HOST_DEVICE float k(uint32_t dim) const {
      const int32_t code = block[PaperBlock::k_codes + k8_offset(slot, dim)];
      return static_cast<float>(code - kKeyBias) * k_scale;
    }
    POLYKV_HOST_DEVICE float v(uint32_t dim) const {
      return a.paper_levels[v3_get(block + a.v_offset, slot, dim, a.v_head_dim)] * norm;
    }
  };

  POLYKV_HOST_DEVICE static StoredRows exact_row(const Warp& w, uint32_t index) {
    const uint64_t row = uint64_t{w.kv_head} * w.part.exact_capacity + index;
    return {w.part.exact_k + row * w.a.k_head_dim, w.part.exact_v + row * w.a.v_head_dim,
            Dtype::f16, w.part.exact_k_unit, w.part.exact_v_unit};
  }

  POLYKV_HOST_DEVICE static const uint8_t* block_of(const Warp& w, uint64_t token) {
    return w.part.blocks +
           (w.kv_head * w.part.block_count + token / kBlockTokens) * w.a.block_bytes;
  }

  POLYKV_HOST_DEVICE static StoredRows block_row(const Warp& w, uint64_t token) {
    const uint64_t element_bytes = w.a.source_dtype == Dtype::f32 ? 4 : 2;
    const uint8_t* block = block_of(w, token);
    const uint64_t slot = token % kBlockTokens;
    return {block + slot * w.a.k_head_dim * element_bytes,
            block + w.a.v_offset + slot * w.a.v_head_dim * element_bytes, w.a.source_dtype, 1, 1};
  }

  POLYKV_HOST_DEVICE static PaperRows paper_row(const Warp& w, uint64_t token) {
    const uint8_t* block = block_of(w, token);
    const auto slot = static_cast<uint32_t>(token % kBlockTokens);
    const auto* norms = reinterpret_cast<const uint16_t*>(block + PaperBlock::v_norms);
    return {w.a, block, slot, w.part.k_unit, from_f16(norms[slot]) * w.part.v_unit};
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static void attend_tokens(Thread& cuda, Warp& w, uint32_t split) {
    if (w.a.kind == PlainRows::exact_rows) {
      for (uint32_t i = w.warp; i < w.part.exact_count; i += kWarps) {
        const uint64_t token = w.part.exact_tokens[i];
        if (token < w.part.first_token || token >= w.part.end_token) continue;
        attend_token(cuda, w, token, exact_row(w, i));
      }
      return;
    }
    // By blocks, as splits are counted: a range may begin inside one.
    const uint64_t start =
        w.part.first_token / kBlockTokens * kBlockTokens + uint64_t{split} * w.a.split_tokens;
    const uint64_t first = start < w.part.first_token ? w.part.first_token : start;
    const uint64_t limit = start + w.a.split_tokens;
    const uint64_t end = w.part.end_token < limit ? w.part.end_token : limit;
    for (uint64_t token = first + w.warp; token < end; token += kWarps) {
      if (w.a.kind == PlainRows::paper_blocks) {
        attend_token(cuda, w, token, paper_row(w, token));
      } else {
        attend_token(cuda, w, token, block_row(w, token));
      }
    }
  }

  template <typename Thread, typename Rows>
  POLYKV_HOST_DEVICE static void attend_token(Thread& cuda, Warp& w, uint64_t token,
                                              const Rows& rows) {
    float k[kLaneDims];
    float v[kLaneDims];
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kLaneDims; ++i) {
      const uint32_t dim = w.lane + i * kWarpThreads;
      k[i] = dim < w.a.k_head_dim ? rows.k(dim) : 0.0F;
      v[i] = dim < w.a.v_head_dim ? rows.v(dim) : 0.0F;
    }
    POLYKV_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      if (token < w.first_seen[r]) continue;  // the whole warp
      float logit = 0;
      POLYKV_UNROLL
      for (uint32_t i = 0; i < kLaneDims; ++i) {
        const uint32_t dim = w.lane + i * kWarpThreads;
        if (dim < w.a.k_head_dim) logit += w.shared.queries[r][dim] * k[i];
      }
      logit = capped(warp_sum(cuda, logit), w.a.rows.soft_cap);
      SplitState& state = w.states[r];
      const float maximum = fmaxf(state.maximum, logit);
      const float factor = state.maximum > -INFINITY ? exp_of(state.maximum - maximum) : 0.0F;
      const float weight = exp_of(logit - maximum);
      state = {maximum, state.sum * factor + weight};
      POLYKV_UNROLL
      for (uint32_t i = 0; i < kLaneDims; ++i) {
        const uint32_t dim = w.lane + i * kWarpThreads;
        if (dim >= w.a.v_head_dim) break;
        float& output = w.shared.outputs[w.warp][r][dim];
        output = output * factor + weight * v[i];
      }
    }
  }
};

}  // namespace polykv::cuda
