// Queues the kernels of one attention: queries are prepared, splits attend, their results are joined. Launcher: as in
// kernels/cuda/decode_launcher.h.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cuda/attend_call.h"
#include "kernels/cuda/attend_packed_kernel.h"
#include "kernels/cuda/attend_plain_kernel.h"
#include "kernels/cuda/attend_tiled_kernel.h"
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
        geometry_(call.runs[0].layer.geometry),
        rows_(call.query_count * call.head_count),
        runs_(call.runs.begin(), call.runs.end()) {
    std::stable_sort(runs_.begin(), runs_.end(), [](const AttendRun& a, const AttendRun& b) {
      return order_of(a.layer.profile) < order_of(b.layer.profile);
    });
    rows_of_.group_rows = rows_ / geometry_.kv_head_count;
    rows_of_.query_count = call.query_count;
    rows_of_.soft_cap = call.soft_cap;
    rows_of_.first_tokens = call.query_first_tokens;
    place_workspace(static_cast<uint8_t*>(memory.data));
  }

  void launch() {
    uint32_t place = 0;
    for_each_launch([&](std::span<const AttendRun> runs, const ProfileRule* rule) {
      if (rule == nullptr) return;
      prepare(runs, *rule);
      place = attend_packed(runs, *rule, place);
      if (rule->v.turns_signs) turned_end_ = place;
      if (rule->v.rotated) rotated_end_ = place;
    });
    for_each_launch([&](std::span<const AttendRun> runs, const ProfileRule* rule) {
      place = attend_plain(runs, rule, place);
    });
    if (is_paper()) rotated_end_ = place;
    join();
  }

 private:
  /// Then all runs are.
  bool is_paper() const { return runs_[0].layer.profile == Profile::paper_k8v3; }

  /// Of a document that `auto` encoded, segments have different profiles: those whose outputs are turned and rotated back,
  /// then rotated back, then neither, follow each other.
  static int order_of(Profile profile) {
    const ProfileRule* rule = profile_rule(profile);
    const int kind = rule == nullptr || !rule->v.rotated ? 2 : rule->v.turns_signs ? 0 : 1;
    return kind * 256 + static_cast<int>(profile);
  }

  /// body(runs of one profile, its rule or null for `exact` and paper-k8v3), as many as fit into a launch's arguments.
  template <typename Body>
  void for_each_launch(Body body) const {
    for (size_t first = 0; first < runs_.size();) {
      const Profile profile = runs_[first].layer.profile;
      size_t end = first;
      while (end < runs_.size() && end - first < kMaxParts && runs_[end].layer.profile == profile)
        ++end;
      body(std::span(runs_).subspan(first, end - first), profile_rule(profile));
      first = end;
    }
  }
  uint32_t index_of(std::span<const AttendRun> runs) const {
    return static_cast<uint32_t>(runs.data() - runs_.data());
  }

  void place_workspace(uint8_t* memory) {
    const auto take = [&](auto*& pointer, uint64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory);
      memory += (count * sizeof *pointer + 255) / 256 * 256;
    };
    workspace_.row_count = rows_;
    workspace_.split_count = static_cast<uint32_t>(plan_.packed_splits + plan_.plain_splits);
    const uint64_t places = uint64_t{rows_} * workspace_.split_count;
    take(workspace_.words, uint64_t{rows_} * geometry_.k_head_dim / 2);
    take(workspace_.rows, rows_);
    take(workspace_.mean_logits, call_.runs.size() * rows_);
    take(workspace_.states, places);
    take(workspace_.outputs, places * geometry_.v_head_dim);
  }

  static AttendPart part_of(const AttendRun& run) {
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
    part.k_unit = layer.profile == Profile::paper_k8v3 ? scales.k_scale
                                                       : std::ldexp(1.0F, scales.k_gain_exponent);
    part.v_unit = std::ldexp(1.0F, scales.v_gain_exponent);
    part.exact_k_unit = std::ldexp(1.0F, scales.exact_k_exponent);
    part.exact_v_unit = std::ldexp(1.0F, scales.exact_v_exponent);
    return part;
  }

  /// The parts of a launch and how many splits they have.
  template <typename CountSplits>
  static uint32_t place_parts(std::span<const AttendRun> runs, AttendPart* parts,
                              CountSplits count_splits) {
    uint32_t split = 0;
    for (const AttendRun& run : runs) {
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

  AskedRows asked() const {
    return {call_.q, call_.query_dtype, call_.q_strides, call_.scale, call_.query_count};
  }

  void prepare(std::span<const AttendRun> runs, const ProfileRule& rule) {
    PrepareQueriesArguments a{};
    a.asked = asked();
    a.row_count = rows_;
    a.group_rows = rows_of_.group_rows;
    a.head_dim = geometry_.k_head_dim;
    a.bits = rule.k.bits;
    a.signs = turned_signs(rule.k);
    a.workspace = workspace_;
    a.first_part = index_of(runs);
    for (const AttendRun& run : runs) a.means[a.part_count++] = run.layer.k_means;
    constexpr uint32_t kRows = PrepareQueriesKernel::kWarps;
    launcher_.template launch<PrepareQueriesKernel>((rows_ + kRows - 1) / kRows, a);
  }

  uint32_t attend_packed(std::span<const AttendRun> runs, const ProfileRule& rule, uint32_t place) {
    AttendPackedArguments a{};
    a.k = packed_tensor(runs[0].layer, k_part(rule, geometry_));
    a.v = packed_tensor(runs[0].layer, v_part(rule, geometry_));
    a.tile_count = plan_.tile_count;
    a.split_blocks = plan_.split_blocks;
    a.rows = rows_of_;
    a.workspace = workspace_;
    a.first_part = index_of(runs);
    a.first_place = place;
    a.split_count =
        place_parts(runs, a.parts, [&](const AttendRun& run) { return block_splits(run); });
    const uint64_t blocks = uint64_t{geometry_.kv_head_count} * a.split_count * plan_.tile_count;
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
      case 8:
        launcher_.template launch<AttendPackedKernel<8>>(blocks, a);
        break;
      case kLargeTileRows:
        launcher_.template launch<AttendTiledKernel<kMostLargeTileDims, 4>>(blocks, a);
        break;
      default:
        if (std::max(geometry_.k_head_dim, geometry_.v_head_dim) <= 128) {
          launcher_.template launch<AttendTiledKernel<128, 1>>(blocks, a);
        } else {
          launcher_.template launch<AttendTiledKernel<kMaxDeviceHeadDim, 1>>(blocks, a);
        }
    }
    return place + a.split_count;
  }

  uint32_t attend_plain(std::span<const AttendRun> runs, const ProfileRule* rule, uint32_t place) {
    AttendPlainArguments a{};
    a.asked = asked();
    const LayerView& layer = runs[0].layer;
    a.source_dtype = layer.source_dtype;
    a.block_bytes = layer.block_bytes;
    if (rule != nullptr) {
      a.kind = PlainRows::exact_rows;
    } else if (is_paper()) {
      a.kind = PlainRows::paper_blocks;
      a.v_offset = PaperBlock::v_codes(geometry_);
      for (uint32_t code = 0; code < 8; ++code)
        a.paper_levels[code] = paper_level(code, geometry_.v_head_dim);
    } else {
      a.kind = PlainRows::exact_blocks;
      a.v_offset = kBlockTokens * geometry_.k_head_dim * dtype_size_bytes(layer.source_dtype);
    }
    a.k_head_dim = geometry_.k_head_dim;
    a.v_head_dim = geometry_.v_head_dim;
    a.tile_count = (rows_of_.group_rows + kPlainTileRows - 1) / kPlainTileRows;
    a.split_tokens = plan_.split_blocks * kBlockTokens;
    a.rows = rows_of_;
    a.workspace = workspace_;
    a.first_place = place;
    a.split_count = place_parts(runs, a.parts, [&](const AttendRun& run) -> uint32_t {
      if (rule == nullptr) return block_splits(run);
      return run.layer.exact_row_count > 0 ? 1 : 0;
    });
    const uint64_t blocks = uint64_t{geometry_.kv_head_count} * a.split_count * a.tile_count;
    if (blocks == 0) return place;
    launcher_.template launch<AttendPlainKernel>(blocks, a);
    return place + a.split_count;
  }

  void join() {
    JoinSplitsArguments a{};
    a.workspace = workspace_;
    a.turned_end = turned_end_;
    a.rotated_end = rotated_end_;
    a.head_dim = geometry_.v_head_dim;
    a.signs = turned_signs(rotated_k(4));  // of whatever is turned
    a.query_count = call_.query_count;
    a.head_count = call_.head_count;
    a.output = call_.output;
    a.dtype = call_.output_dtype;
    a.strides = call_.output_strides;
    a.log_sum_exp = call_.log_sum_exp;
    launcher_.template launch<JoinSplitsKernel>(rows_, a);
  }

  Launcher& launcher_;
  const AttendCall& call_;
  const AttendPlan& plan_;
  const LayerGeometry geometry_;
  uint32_t rows_;
  std::vector<AttendRun> runs_;  // by order_of()
  // Of the splits: where those whose outputs are turned end, and those that are rotated.
  uint32_t turned_end_ = 0;
  uint32_t rotated_end_ = 0;
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
