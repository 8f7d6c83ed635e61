#include "kernels/cuda/attend_call.h"

#include <algorithm>
#include <cassert>
#include <cmath>

#include "kernels/cuda/attend_arguments.h"
#include "kernels/cuda/launch_rules.h"

namespace polykv::cuda {

namespace {

constexpr char kAttend[] = "attend";
constexpr uint64_t kMaxRows = uint64_t{1} << 24;
// Thread blocks that keep a multiprocessor busy: more than fit at once, so that the last wave is short beside the rest.
constexpr uint64_t kBlocksPerMultiprocessor = 8;
// A split has at least so many blocks: what it writes and the join reads stays small beside what it reads.
constexpr uint64_t kMinSplitBlocks = 8;
constexpr uint64_t kMinLargeSplitBlocks = 16;  // of tiles of 64 rows
constexpr uint64_t kWarps = 4;
// By instructions counted (docs/gpu.md): the tensor cores' tile costs as much for 3 rows as for 16.
constexpr uint64_t kMostScalarRows = 2;

uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Status invalid(std::string cause) {
  return {POLYKV_ERR_INVALID_ARGUMENT, "attend on the device: " + std::move(cause)};
}

Status check_run(const AttendRun& run, const AttendRun& first) {
  POLYKV_RETURN_IF_ERROR(
      check_token_range(kAttend, run.first_token, run.token_count, run.layer.token_count));
  POLYKV_RETURN_IF_ERROR(check_layer_shape(kAttend, run.layer.profile, run.layer.geometry));
  // Its outputs would have a place of their own among those that are rotated back; no document mixes them.
  if ((run.layer.profile == Profile::paper_k8v3) != (first.layer.profile == Profile::paper_k8v3))
    return invalid("segments of paper-k8v3 and of another profile; they are not of one document");
  if (run.layer.source_dtype == first.layer.source_dtype &&
      run.layer.geometry == first.layer.geometry)
    return Status::ok();
  return invalid(
      "segments of different geometry or dtype in one call: they are not one document's");
}

}  // namespace

Status check_attend(const AttendCall& call) {
  if (call.runs.empty()) return invalid("no segment; name at least one, if with no tokens");
  const LayerView& layer = call.runs[0].layer;
  for (const AttendRun& run : call.runs) POLYKV_RETURN_IF_ERROR(check_run(run, call.runs[0]));
  const uint32_t kv_heads = layer.geometry.kv_head_count;
  if (call.query_count == 0 || call.head_count == 0 || call.head_count % kv_heads != 0 ||
      uint64_t{call.query_count} * call.head_count > kMaxRows) {
    return invalid(format(
        "%u queries of %u heads; heads are a multiple of the %u kv_heads, and queries times "
        "heads at most %llu",
        call.query_count, call.head_count, kv_heads, static_cast<unsigned long long>(kMaxRows)));
  }
  if (call.q == nullptr || call.output == nullptr) return invalid("q or output is null");
  POLYKV_RETURN_IF_ERROR(check_dtype(kAttend, call.query_dtype));
  POLYKV_RETURN_IF_ERROR(check_dtype(kAttend, call.output_dtype));
  POLYKV_RETURN_IF_ERROR(check_aligned(kAttend, "q", call.q, call.query_dtype));
  POLYKV_RETURN_IF_ERROR(check_aligned(kAttend, "output", call.output, call.output_dtype));
  POLYKV_RETURN_IF_ERROR(check_aligned(kAttend, "log_sum_exp", call.log_sum_exp, Dtype::f32));
  if (!std::isfinite(call.scale) || !std::isfinite(call.soft_cap) || call.soft_cap < 0) {
    return invalid(format("scale %g or soft_cap %g is not finite, or soft_cap is negative",
                          static_cast<double>(call.scale), static_cast<double>(call.soft_cap)));
  }
  return Status::ok();
}

AttendPlan plan_attend(const AttendCall& call, uint32_t multiprocessor_count) {
  const LayerView& layer = call.runs[0].layer;
  const uint64_t kv_heads = layer.geometry.kv_head_count;
  const uint64_t rows = uint64_t{call.query_count} * call.head_count;
  const uint64_t group_rows = rows / kv_heads;
  const auto is_packed = [](const AttendRun& run) {
    return profile_rule(run.layer.profile) != nullptr;
  };
  AttendPlan plan;
  plan.tile_rows = kPlainTileRows;
  uint64_t min_split_blocks = kMinSplitBlocks;
  if (std::any_of(call.runs.begin(), call.runs.end(), is_packed)) {
    const bool is_tensor = call.products == Products::tensor ||
                           (call.products == Products::automatic && group_rows > kMostScalarRows);
    if (is_tensor) {
      const uint32_t widest = std::max(layer.geometry.k_head_dim, layer.geometry.v_head_dim);
      const bool is_large = group_rows > kTileRows && widest <= kMostLargeTileDims;
      plan.tile_rows = is_large ? kLargeTileRows : kTileRows;
      if (is_large) min_split_blocks = kMinLargeSplitBlocks;
    } else {
      plan.tile_rows = 1;
      while (plan.tile_rows < std::min<uint64_t>(group_rows, kMostTileRows)) plan.tile_rows *= 2;
    }
  }
  plan.tile_count = static_cast<uint32_t>((group_rows + plan.tile_rows - 1) / plan.tile_rows);
  const auto blocks_of = [](const AttendRun& run) -> uint64_t {
    if (run.token_count == 0) return 0;
    return (run.first_token + run.token_count - 1) / kBlockTokens - run.first_token / kBlockTokens +
           1;
  };
  uint64_t blocks = 0;
  for (const AttendRun& run : call.runs) blocks += blocks_of(run);
  const uint64_t wanted = std::max<uint64_t>(
      1, multiprocessor_count * kBlocksPerMultiprocessor / (kv_heads * plan.tile_count));
  plan.split_blocks = static_cast<uint32_t>(
      round_up(std::max((blocks + wanted - 1) / wanted, min_split_blocks), kWarps));
  for (const AttendRun& run : call.runs) {
    const uint64_t splits = (blocks_of(run) + plan.split_blocks - 1) / plan.split_blocks;
    (is_packed(run) ? plan.packed_splits : plan.plain_splits) += splits;
    if (is_packed(run) && run.token_count > 0 && run.layer.exact_row_count > 0) ++plan.plain_splits;
  }
  // As many splits as there can be of so many tokens, or of fewer: a workspace that is enough for a whole document is
  // enough for each part of it. Each run may end in a split that is not full, and have one of exact rows.
  const uint64_t splits = std::min(blocks / kMinSplitBlocks, wanted) + 2 * call.runs.size();
  assert(plan.packed_splits + plan.plain_splits <= splits);
  const LayerGeometry& geometry = layer.geometry;
  plan.workspace_bytes =
      rows * geometry.k_head_dim * 2 + rows * sizeof(RowScale) +
      call.runs.size() * rows * sizeof(float) +
      rows * splits * (sizeof(SplitState) + geometry.v_head_dim * sizeof(float)) + 5 * 256;
  return plan;
}

}  // namespace polykv::cuda
