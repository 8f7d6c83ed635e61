#include "kernels/cpu/attend_packed.h"

#include <algorithm>
#include <cmath>

#include "kernels/codebooks.h"
#include "kernels/cpu/attend_plain.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu_choice.h"

namespace polykv::cpu {

namespace {

// With more rows than a tile, blocks are taken so many at a time, which stay in the L2 cache.
constexpr uint64_t kChunkBlocks = 8;
// Of fewer blocks, several streams would be short ones.
constexpr uint64_t kLeastStreamBlocks = 2;

/// In which order the blocks of a range are taken: by turns from as many streams as are fetched at a time, each of
/// neighbouring blocks, for softmax does not ask for an order; then those that are left over.
struct BlockOrder {
  uint64_t first_block;
  uint64_t block_count;
  uint64_t streams;
  uint64_t stream_blocks;  // of each

  BlockOrder(uint64_t first, uint64_t count)
      : first_block(first),
        block_count(count),
        streams(count < kAheadStreams * kLeastStreamBlocks ? 1 : kAheadStreams),
        stream_blocks(count / streams) {}

  uint64_t turn_count() const { return streams * stream_blocks; }
  uint64_t block(uint64_t step) const {
    return first_block +
           (step < turn_count() ? step % streams * stream_blocks + step / streams : step);
  }
};

/// Bits [low, high) of a block's 64.
uint64_t bits_between(uint64_t low, uint64_t high) {
  const auto below = [](uint64_t bit) {
    return bit >= 64 ? ~uint64_t{0} : (uint64_t{1} << bit) - 1;
  };
  return below(high) & ~below(low);
}

/// A kv_head's share of one call.
class PackedHead {
 public:
  PackedHead(const AttendOps& attend_ops, const LayerView& layer, uint32_t kv_head,
             uint64_t document_token, const AttendQueries& queries, AttendPart& part,
             AttendScratch& scratch)
      : attend_ops_(attend_ops),
        layer_(layer),
        kv_head_(kv_head),
        document_token_(document_token),
        queries_(queries),
        part_(part),
        scratch_(scratch),
        k_part_(k_part(*profile_rule(layer.profile), layer.geometry)),
        v_part_(v_part(*profile_rule(layer.profile), layer.geometry)),
        k_dim_(layer.geometry.k_head_dim),
        v_dim_(layer.geometry.v_head_dim),
        row_count_(queries.head_count / layer.geometry.kv_head_count * queries.row_count),
        q_(queries.q + size_t{kv_head} * row_count_ * k_dim_) {}

  bool attend(uint64_t first, uint64_t end) {
    return attend_exact_rows(first, end) && attend_packed_rows(first, end);
  }

 private:
  /// Exact rows are few, and uncentred: plain fp32.
  bool attend_exact_rows(uint64_t first, uint64_t end) {
    const uint32_t* tokens = layer_.exact_tokens;
    const auto low = std::lower_bound(tokens, tokens + layer_.exact_row_count, first) - tokens;
    const auto high = std::lower_bound(tokens, tokens + layer_.exact_row_count, end) - tokens;
    if (low == high) return true;
    const auto count = static_cast<size_t>(high - low);
    const size_t row = size_t{kv_head_} * layer_.exact_row_capacity + static_cast<size_t>(low);
    load_exact(layer_.exact_k + row * k_dim_, count * k_dim_, layer_.scales.exact_k_exponent,
               scratch_.k);
    load_exact(layer_.exact_v + row * v_dim_, count * v_dim_, layer_.scales.exact_v_exponent,
               scratch_.v);
    scratch_.skipped.assign(queries_.row_count, 0);
    for (uint32_t i = 0; queries_.first_tokens != nullptr && i < queries_.row_count; ++i) {
      const uint64_t token = queries_.first_tokens[i];
      const uint64_t in_segment = token < document_token_ ? 0 : token - document_token_;
      scratch_.skipped[i] = static_cast<size_t>(
          std::lower_bound(tokens + low, tokens + high, in_segment) - (tokens + low));
    }
    return attend_plain(q_, layer_.geometry, count, queries_, scratch_.skipped, part_, scratch_);
  }

  static void load_exact(const uint16_t* halves, size_t count, int32_t exponent,
                         std::vector<float>& out) {
    out.resize(std::max(out.size(), count));
    ops().f32_from_f16(halves, out.data(), count);
    const float scale = std::ldexp(1.0F, exponent);
    for (size_t i = 0; i < count; ++i) out[i] *= scale;
  }

  bool attend_packed_rows(uint64_t first, uint64_t end) {
    prepare_queries();
    if (!attend_blocks(first, end)) return false;
    take_in_outputs();
    return true;
  }

  static int largest_exponent(const float* values, uint32_t count) {
    float largest = 0;
    for (uint32_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(values[i]));
    return largest == 0 ? 0 : std::clamp(std::ilogb(largest), -126, 126);
  }

  void prepare_queries() {
    AttendScratch& rows = scratch_;
    rows.words.resize(size_t{row_count_} * k_dim_ / 2);
    rows.outputs.assign(size_t{row_count_} * v_dim_, 0.0F);
    rows.states.assign(row_count_, SoftmaxState());
    rows.queries.resize(row_count_);
    const float* means =
        layer_.k_means == nullptr ? nullptr : layer_.k_means + size_t{kv_head_} * k_dim_;
    float rotated[kMaxHeadDim];
    for (uint32_t row = 0; row < row_count_; ++row) {
      const float* q = q_ + size_t{row} * k_dim_;
      PackedQuery& query = rows.queries[row];
      query.mean_logit = 0;
      if (means != nullptr) {
        for (uint32_t i = 0; i < k_dim_; ++i) query.mean_logit += q[i] * means[i];
      }
      // A power of two keeps the rotation and the fixed-point step within fp32.
      const int exponent = largest_exponent(q, k_dim_);
      const float power = std::ldexp(1.0F, -exponent);
      for (uint32_t i = 0; i < k_dim_; ++i) rotated[i] = q[i] * power;
      if (k_part_.rule.rotated) ops().rotate(rotated, k_dim_, k_part_.rule);
      attend_ops_.pack_query(rotated, k_dim_, &rows.words[size_t{row} * k_dim_ / 2], &query);
      query.scale = std::ldexp(query.scale, exponent + layer_.scales.k_gain_exponent);
      query.state = &rows.states[row];
      query.output = &rows.outputs[size_t{row} * v_dim_];
    }
  }

  bool attend_blocks(uint64_t first, uint64_t end) {
    const uint64_t first_block = first / kBlockTokens;
    const BlockOrder order(first_block, (end - 1) / kBlockTokens + 1 - first_block);
    const uint64_t chunk = row_count_ <= kPackedRows ? order.block_count : kChunkBlocks;
    for (uint64_t step = 0; step < order.block_count;) {
      const uint64_t next = std::min(step + chunk, order.block_count);
      for (uint32_t row = 0; row < row_count_; row += kPackedRows) {
        for (uint64_t i = step; i < next; ++i) {
          // The first tile brings the blocks into the caches, for the others as well.
          const Ahead ahead = row == 0 ? ahead_of(order, i) : Ahead();
          if (!attend_tile(order.block(i), row, first, end, ahead)) return false;
        }
      }
      step = next;
    }
    return true;
  }

  /// What a step fetches: its share of every stream's next block, or of the first block that is left over, or all of the
  /// next one of these. At the end of a segment it is the streams' first blocks of the next kv_head.
  Ahead ahead_of(const BlockOrder& order, uint64_t step) const {
    const bool is_turn = step < order.turn_count();
    const uint64_t share = is_turn ? step % order.streams : 0;
    const uint64_t shares = is_turn ? order.streams : 1;
    const uint64_t round = step / order.streams + 1;
    if (is_turn && order.streams > 1 && round < order.stream_blocks)
      return streams_share(layer_.block(kv_head_, order.first_block + round), order, share);
    const uint64_t next = is_turn && order.streams > 1 ? order.turn_count() : step + 1;
    if (next < order.block_count)
      return block_share(layer_.block(kv_head_, order.first_block + next), share, shares);
    if (order.block_count < layer_.block_count || kv_head_ + 1 == layer_.geometry.kv_head_count)
      return {};
    return streams_share(layer_.block(kv_head_ + 1, 0), order, share);
  }

  /// Lines of a quarter of a block.
  uint64_t quarter_lines() const {
    return (layer_.block_bytes + kAheadStreams * kLineBytes - 1) / (kAheadStreams * kLineBytes);
  }
  Ahead streams_share(const uint8_t* first, const BlockOrder& order, uint64_t share) const {
    const uint64_t lines = quarter_lines();
    return {reinterpret_cast<uintptr_t>(first) + share * lines * kLineBytes,
            order.stream_blocks * layer_.block_bytes, static_cast<uint32_t>(lines)};
  }
  Ahead block_share(const uint8_t* block, uint64_t share, uint64_t shares) const {
    const uint64_t lines = (quarter_lines() + shares - 1) / shares;
    const uint64_t apart_bytes = lines * kLineBytes;
    return {reinterpret_cast<uintptr_t>(block) + share * kAheadStreams * apart_bytes, apart_bytes,
            static_cast<uint32_t>(lines)};
  }

  /// Rows [row, row + kPackedRows) and one block.
  bool attend_tile(uint64_t block, uint32_t row, uint64_t first, uint64_t end, const Ahead& ahead) {
    const uint64_t start = block * kBlockTokens;
    uint64_t unseen = ~bits_between(first < start ? 0 : first - start, end - start);
    const uint32_t* exact_end = layer_.exact_tokens + layer_.exact_row_count;
    for (const uint32_t* exact = std::lower_bound(layer_.exact_tokens, exact_end, start);
         exact != exact_end && *exact >= start && *exact < start + kBlockTokens; ++exact)
      unseen |= uint64_t{1} << (*exact - start);
    PackedQuery* rows = &scratch_.queries[row];
    const uint32_t count = std::min(kPackedRows, row_count_ - row);
    uint64_t unseen_by_all = ~uint64_t{0};
    for (uint32_t i = 0; i < count; ++i) {
      rows[i].unseen = unseen;
      if (queries_.first_tokens != nullptr) {
        const uint64_t token = queries_.first_tokens[(row + i) % queries_.row_count];
        const uint64_t block_token = document_token_ + start;
        if (token > block_token) rows[i].unseen |= bits_between(0, token - block_token);
      }
      unseen_by_all &= rows[i].unseen;
    }
    if (unseen_by_all == ~uint64_t{0}) return true;
    const PackedBlock packed = {k_part_, v_part_, queries_.soft_cap, layer_.block(kv_head_, block),
                                ahead};
    return attend_ops_.attend_block(packed, rows, count);
  }

  void take_in_outputs() {
    AttendScratch& rows = scratch_;
    const float power = std::ldexp(1.0F, layer_.scales.v_gain_exponent);
    for (uint32_t row = 0; row < row_count_; ++row) {
      if (rows.states[row].sum == 0) continue;
      float* output = &rows.outputs[size_t{row} * v_dim_];
      for (uint32_t i = 0; i < v_dim_; ++i) output[i] *= power;
      if (v_part_.rule.rotated) ops().rotate_back(output, v_dim_, v_part_.rule);
      take_in(rows.states[row], output, v_dim_, part_.states[row],
              &part_.outputs[size_t{row} * v_dim_]);
    }
  }

  const AttendOps& attend_ops_;
  const LayerView& layer_;
  uint32_t kv_head_;
  uint64_t document_token_;
  const AttendQueries& queries_;
  AttendPart& part_;
  AttendScratch& scratch_;
  TensorPart k_part_;
  TensorPart v_part_;
  uint32_t k_dim_;
  uint32_t v_dim_;
  uint32_t row_count_;
  const float* q_;
};

}  // namespace

const AttendOps* attend_ops() {
  static const AttendOps* const chosen = []() -> const AttendOps* {
    // Whatever keeps the codecs' loops from AVX2 keeps these as well.
    if (&ops() == &baseline_ops()) return nullptr;
    const AttendOps* wide = cpu_choice() == CpuChoice::avx2 ? nullptr : avx512_attend_ops();
    return wide != nullptr ? wide : avx2_attend_ops();
  }();
  return chosen;
}

const AttendOps* packed_ops_for(const LayerView& layer) {
  if (active_backend() != Backend::cpu || profile_rule(layer.profile) == nullptr) return nullptr;
  if (attend_ops() == nullptr) return nullptr;
  // The widest that takes these dims.
  for (const AttendOps* ops : {attend_ops(), avx2_attend_ops()}) {
    if (layer.geometry.v_head_dim % ops->v_dim_multiple == 0) return ops;
  }
  return nullptr;
}

bool attend_packed(const AttendOps& attend_ops, const LayerView& layer, uint32_t kv_head,
                   uint64_t document_token, uint64_t first_token, uint64_t token_count,
                   const AttendQueries& queries, AttendPart& part, AttendScratch& scratch) {
  if (token_count == 0) return true;
  return PackedHead(attend_ops, layer, kv_head, document_token, queries, part, scratch)
      .attend(first_token, first_token + token_count);
}

}  // namespace polykv::cpu
