// Attention to a document on the device, as the caller asks for it.
#pragma once

#include <cstdint>
#include <span>

#include "common/result.h"
#include "kernels/codec.h"

namespace polykv::cuda {

/// Tokens [first_token, first_token + token_count) of a segment, counted from its first.
struct AttendRun {
  LayerView layer;              // its pointers are the device's
  uint64_t document_token = 0;  // which token of the document the segment's first is
  uint64_t first_token = 0;
  uint64_t token_count = 0;
};

/// Distances in elements.
struct QueryStrides {
  int64_t query = 0;
  int64_t head = 0;
  int64_t dim = 1;
};

/// How packed rows are multiplied: by the multiprocessors' int8 instructions, or by the tensor cores, which a
/// few rows leave idle. Either gives the same up to rounding in fp32.
enum class Products { automatic, scalar, tensor };

/// As polykv_attend_options (include/polykv/attend.h), with the device's pointers. Logits are those of
/// keys as they were before centring: results of several calls, and of the caller's own suffix, join by their
/// log-sum-exps.
struct AttendCall {
  std::span<const AttendRun> runs;  // of one document's layer; profiles may differ
  uint32_t query_count = 0;
  uint32_t head_count = 0;  // a multiple of kv_head_count
  Dtype query_dtype = Dtype::f32;
  const void* q = nullptr;  // [query, head, k_head_dim] under q_strides
  QueryStrides q_strides;
  float scale = 1;     // of logits
  float soft_cap = 0;  // 0: none
  // [query], tokens of the document; null: all. On the device, so work is cut by the runs: they had better not
  // begin long before what any row sees.
  const uint64_t* query_first_tokens = nullptr;
  Dtype output_dtype = Dtype::f32;
  void* output = nullptr;  // [query, head, v_head_dim] under output_strides
  QueryStrides output_strides;
  float* log_sum_exp = nullptr;  // [query, head]; null: not wanted
  Products products = Products::automatic;
};

/// Memory of the device that a call uses while it runs; 256-byte aligned. Streams need one each.
struct Workspace {
  void* data = nullptr;
  uint64_t size_bytes = 0;
};

/// How a call is cut into thread blocks: a pure function, so that tests use the same shapes.
struct AttendPlan {
  uint32_t tile_rows = 0;  // rows that share what is unpacked
  uint32_t tile_count = 0;
  uint32_t split_blocks = 0;
  uint64_t packed_splits = 0;  // of all runs
  uint64_t plain_splits = 0;   // of rows that are not packed
  uint64_t workspace_bytes = 0;
};

/// The call was checked. multiprocessor_count: of the device.
AttendPlan plan_attend(const AttendCall& call, uint32_t multiprocessor_count);
/// What attend() refuses.
Status check_attend(const AttendCall& call);

}  // namespace polykv::cuda
