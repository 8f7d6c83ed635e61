// Queues the kernels of one attention: queries are prepared, splits attend, their results are joined. Launcher: as in
// kernels/cuda/decode_launcher.h.
#pragma once

#include <algorithm>

#include "kernels/cuda/attend_call.h"
#include "kernels/cuda/attend_packed_kernel.h"
#include "kernels/cuda/attend_plain_kernel.h"
#include "kernels/cuda/join_splits_kernel.h"
#include "kernels/cuda/launch_rules.h"
#include "kernels/cuda/prepare_queries_kernel.h"

namespace polykv::cuda {

template <typename Launcher>
class AttendLaunch {
 public:
  AttendLaunch(Launcher& launcher, const AttendCall& call, const AttendPlan& plan,
               const Workspace& memory)
      : launcher_(launcher),
        call_(call),
        plan_(plan),
        layer_(call.runs[0].layer),
        rule_(profile_rule(layer_.profile)),
        rows_(call.query_count * call.head_count) {
    rows_of_.group_rows = rows_ / layer_.geometry.kv_head_count;
    rows_of_.query_count = call.query_count;
    rows_of_.soft_cap = call.soft_cap;
    rows_of_.first_tokens = call.query_first_tokens;
    place_workspace(static_cast<uint8_t*>(memory.data));
  }

  void launch() {
    // Runs whose descriptions fit into a launch's arguments.
    uint32_t place = 0;
    for (size_t first = 0; rule_ != nullptr && first < call_.runs.size(); first += kMaxParts) {
      prepare(first);
      place = attend_packed(first, place);
    }
    for (size_t first = 0; first < call_.runs.size(); first += kMaxParts)
      place = attend_plain(first, place);
    join();
  }

 private:
  void place_workspace(uint8_t* memory) {
    const auto take = [&](auto*& pointer, uint64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory);
      memory += (count * sizeof *pointer + 255) / 256 * 256;
    };
    workspace_.row_count = rows_;
    workspace_.split_count = static_cast<uint32_t>(plan_.packed_splits + plan_.plain_splits);
    const uint64_t places = uint64_t{rows_} * workspace_.split_count;
    take(workspace_.words, uint64_t{rows_} * layer_.geometry.k_head_dim / 2);
    take(workspace_.rows, rows_);
    take(workspace_.mean_logits, call_.runs.size() * rows_);
    take(workspace_.states, places);
    take(workspace_.outputs, places * layer_.geometry.v_head_dim);
  }

  std::span<const AttendRun> runs(size_t first) const {
    return call_.runs.subspan(first, std::min<size_t>(kMaxParts, call_.runs.size() - first));
  }

  AttendPart part_of(const AttendRun& run) const {
    const LayerView& layer = run.layer;
    const LayerScales& scales = layer.scales;
    AttendPart part{};
    part.blocks = layer.blocks;
    part.block_count = layer.block_count;
    part.document_token = run.document_token;
    part.first_token = run.first_token;
    part.end_token = run.first_token + run.token_count;
    part.means = layer.k_means;
    part.exact_tokens = layer.exact_tokens;
    part.exact_k = layer.exact_k;
    part.exact_v = layer.exact_v;
    part.exact_count = layer.exact_row_count;
    part.exact_capacity = layer.exact_row_capacity;
    part.k_unit = std::ldexp(1.0F, scales.k_gain_exponent);
    part.v_unit = std::ldexp(1.0F, scales.v_gain_exponent);
    part.exact_k_unit = std::ldexp(1.0F, scales.exact_k_exponent);
    part.exact_v_unit = std::ldexp(1.0F, scales.exact_v_exponent);
    return part;
  }

  /// The parts of a launch and how many splits they have.
  template <typename CountSplits>
  uint32_t place_parts(size_t first, AttendPart* parts, CountSplits count_splits) const {
    uint32_t split = 0;
    for (const AttendRun& run : runs(first)) {
      AttendPart part = part_of(run);
      part.first_split = split;
      part.split_count = run.token_count == 0 ? 0 : count_splits(run);
      split += part.split_count;
      *parts++ = part;
    }
    return split;
  }
  uint32_t block_splits(const AttendRun& run) const {
    const uint64_t first = run.first_token / kBlockTokens;
    const uint64_t last = (run.first_token + run.token_count - 1) / kBlockTokens;
    return static_cast<uint32_t>((last - first) / plan_.split_blocks + 1);
  }

  void prepare(size_t first) {
    PrepareQueriesArguments a{};
    a.q = call_.q;
    a.dtype = call_.query_dtype;
    a.query_stride = call_.q_strides.query;
    a.head_stride = call_.q_strides.head;
    a.dim_stride = call_.q_strides.dim;
    a.scale = call_.scale;
    a.query_count = call_.query_count;
    a.row_count = rows_;
    a.group_rows = rows_of_.group_rows;
    a.head_dim = layer_.geometry.k_head_dim;
    a.bits = rule_->k.bits;
    a.signs = turned_signs(rule_->k);
    a.workspace = workspace_;
    a.first_part = static_cast<uint32_t>(first);
    for (const AttendRun& run : runs(first)) a.means[a.part_count++] = run.layer.k_means;
    constexpr uint32_t kRows = PrepareQueriesKernel::kWarps;
    launcher_.template launch<PrepareQueriesKernel>((rows_ + kRows - 1) / kRows, a);
  }

  uint32_t attend_packed(size_t first, uint32_t place) {
    AttendPackedArguments a{};
    a.k = packed_tensor(layer_, k_part(*rule_, layer_.geometry));
    a.v = packed_tensor(layer_, v_part(*rule_, layer_.geometry));
    a.tile_count = plan_.tile_count;
    a.split_blocks = plan_.split_blocks;
    a.rows = rows_of_;
    a.workspace = workspace_;
    a.first_part = static_cast<uint32_t>(first);
    a.first_place = place;
    a.split_count =
        place_parts(first, a.parts, [&](const AttendRun& run) { return block_splits(run); });
    const uint64_t blocks =
        uint64_t{layer_.geometry.kv_head_count} * a.split_count * plan_.tile_count;
    if (blocks == 0) return place;
    switch (plan_.tile_rows) {
      case 1:
        launcher_.template launch<AttendPackedKernel<1>>(blocks, a);
        break;
      case 2:
        launcher_.template launch<AttendPackedKernel<2>>(blocks, a);
        break;
      case 4:
        launcher_.template launch<AttendPackedKernel<4>>(blocks, a);
        break;
      default:
        launcher_.template launch<AttendPackedKernel<8>>(blocks, a);
    }
    return place + a.split_count;
  }

  uint32_t attend_plain(size_t first, uint32_t place) {
    AttendPlainArguments a{};
    a.q = call_.q;
    a.q_dtype = call_.query_dtype;
    a.query_stride = call_.q_strides.query;
    a.head_stride = call_.q_strides.head;
    a.dim_stride = call_.q_strides.dim;
    a.scale = call_.scale;
    a.is_exact_rows = rule_ != nullptr;
    a.source_dtype = layer_.source_dtype;
    a.block_bytes = layer_.block_bytes;
    a.k_head_dim = layer_.geometry.k_head_dim;
    a.v_head_dim = layer_.geometry.v_head_dim;
    a.tile_count = (rows_of_.group_rows + kPlainTileRows - 1) / kPlainTileRows;
    a.split_tokens = plan_.split_blocks * kBlockTokens;
    a.rows = rows_of_;
    a.workspace = workspace_;
    a.first_place = place;
    a.split_count = place_parts(first, a.parts, [&](const AttendRun& run) -> uint32_t {
      if (rule_ == nullptr) return block_splits(run);
      return run.layer.exact_row_count > 0 ? 1 : 0;
    });
    const uint64_t blocks = uint64_t{layer_.geometry.kv_head_count} * a.split_count * a.tile_count;
    if (blocks == 0) return place;
    launcher_.template launch<AttendPlainKernel>(blocks, a);
    return place + a.split_count;
  }

  void join() {
    JoinSplitsArguments a{};
    a.workspace = workspace_;
    a.packed_count = static_cast<uint32_t>(plan_.packed_splits);
    a.head_dim = layer_.geometry.v_head_dim;
    if (rule_ != nullptr) {
      a.is_rotated = rule_->v.rotated;
      a.signs = turned_signs(rule_->v);
    }
    a.query_count = call_.query_count;
    a.head_count = call_.head_count;
    a.output = call_.output;
    a.dtype = call_.output_dtype;
    a.query_stride = call_.output_strides.query;
    a.head_stride = call_.output_strides.head;
    a.dim_stride = call_.output_strides.dim;
    a.log_sum_exp = call_.log_sum_exp;
    launcher_.template launch<JoinSplitsKernel>(rows_, a);
  }

  Launcher& launcher_;
  const AttendCall& call_;
  const AttendPlan& plan_;
  const LayerView& layer_;
  const ProfileRule* rule_;  // null: `exact`
  uint32_t rows_;
  AttendRows rows_of_{};
  AttendWorkspace workspace_{};
};

template <typename Launcher>
Status attend_with(Launcher& launcher, const AttendCall& call, const Workspace& workspace,
                   uint32_t multiprocessor_count) {
  POLYKV_RETURN_IF_ERROR(check_attend(call));
  const AttendPlan plan = plan_attend(call, multiprocessor_count);
  if (workspace.data == nullptr || workspace.size_bytes < plan.workspace_bytes ||
      reinterpret_cast<uintptr_t>(workspace.data) % 256 != 0) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("attend on the device: a workspace of %llu bytes, this call needs %llu, aligned "
                   "to 256",
                   static_cast<unsigned long long>(workspace.size_bytes),
                   static_cast<unsigned long long>(plan.workspace_bytes))};
  }
  POLYKV_RETURN_IF_ERROR(check_grid(
      "attend", (plan.packed_splits + plan.plain_splits) * call.head_count * call.query_count));
  AttendLaunch<Launcher>(launcher, call, plan, workspace).launch();
  return launcher.status();
}

}  // namespace polykv::cuda
