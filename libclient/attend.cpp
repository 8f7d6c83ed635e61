#include "libclient/attend.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cmath>

#include "kernels/attend.h"
#include "kernels/cpu/attend_plain.h"
#include "kernels/cpu/tensors.h"

namespace polykv::lib {

namespace {

// Work is cut into more items than there are threads, so that none waits long for the others, but not into ranges that
// are not worth preparing the queries and joining a partial result, nor into more partial results than this.
constexpr uint64_t kItemsOfThread = 4;
constexpr uint64_t kLeastRangeTokens = 512;
constexpr uint64_t kMostPartialValues = uint64_t{1} << 24;
constexpr uint32_t kMostThreads = 256;
// Query rows of all heads: more than any model's prefill chunk, and no size computed from them overflows.
constexpr uint64_t kMostRows = uint64_t{1} << 24;

Status wrong(uint32_t layer, const std::string& what) {
  return {POLYKV_ERR_INVALID_ARGUMENT, format("attend to layer %u: %s", layer, what.c_str())};
}

Status beyond_fp32(uint32_t layer) {
  return wrong(layer,
               "a logit or a weighted sum of values is beyond fp32 (or a gain in the document is "
               "no positive number: polykvctl verify)");
}

/// A row of `dim` elements of a strided tensor [row, head, dim], to fp32 and back.
void load_row(Dtype dtype, const void* data, const Strides& strides, uint32_t head, uint32_t row,
              float* out, uint32_t dim) {
  if (strides.dim == 1) {
    const int64_t offset = reference::element_index(strides, head, row, 0) *
                           static_cast<int64_t>(dtype_size_bytes(dtype));
    return cpu::load_row(dtype, static_cast<const uint8_t*>(data) + offset, out, dim);
  }
  for (uint32_t i = 0; i < dim; ++i)
    out[i] = reference::load_element(data, dtype, reference::element_index(strides, head, row, i));
}
void store_row(Dtype dtype, const float* values, void* data, const Strides& strides, uint32_t head,
               uint32_t row, uint32_t dim) {
  if (strides.dim == 1) {
    const int64_t offset = reference::element_index(strides, head, row, 0) *
                           static_cast<int64_t>(dtype_size_bytes(dtype));
    return cpu::store_row(dtype, values, static_cast<uint8_t*>(data) + offset, dim);
  }
  for (uint32_t i = 0; i < dim; ++i)
    reference::store_element(data, dtype, reference::element_index(strides, head, row, i),
                             values[i]);
}

/// The queries as [head, row, dim], times the scale. Refuses those that are no numbers.
Result<std::vector<float>> scaled_queries(uint32_t layer, const LayerGeometry& geometry,
                                          const AttendRequest& request) {
  const uint32_t dim = geometry.k_head_dim;
  const float scale = attend_scale(request, geometry);
  const Strides strides = dense_unless_given(request.q_strides, request.head_count, dim);
  std::vector<float> scaled(size_t{request.head_count} * request.query_count * dim);
  float* out = scaled.data();
  for (uint32_t head = 0; head < request.head_count; ++head) {
    for (uint32_t row = 0; row < request.query_count; ++row, out += dim) {
      load_row(request.query_dtype, request.q, strides, head, row, out, dim);
      for (uint32_t i = 0; i < dim; ++i) out[i] *= scale;
      if (cpu::all_finite(out, dim)) continue;
      const float* bad = std::find_if(out, out + dim, [](float x) { return !std::isfinite(x); });
      return wrong(
          layer, format("query %u of head %u is %g in dim %td, times a scale of %g", row, head,
                        static_cast<double>(*bad / scale), bad - out, static_cast<double>(scale)));
    }
  }
  return scaled;
}

/// The work: one kv_head and one token range each, with a result of its own, so that the results do not depend on which
/// thread did what.
class Work {
 public:
  Work(const LeasedSegments& segments, uint32_t layer, const LayerGeometry& geometry,
       const AttendRequest& request, const AttendQueries& queries)
      : segments_(segments), layer_(layer), request_(request), queries_(queries) {
    const uint32_t rows = request.head_count / geometry.kv_head_count * request.query_count;
    const uint64_t kv_heads = geometry.kv_head_count;
    if (request.thread_count > 1) {
      const uint64_t wanted = kItemsOfThread * std::min(request.thread_count, kMostThreads);
      const uint64_t least =
          std::min((wanted + kv_heads - 1) / kv_heads, request.token_count / kLeastRangeTokens);
      const uint64_t values = kv_heads * rows * geometry.v_head_dim;
      range_count_ = std::max<uint64_t>(1, std::min(least, kMostPartialValues / values));
    }
    // Whole blocks.
    const uint64_t blocks = (request.token_count + kBlockTokens - 1) / kBlockTokens;
    range_tokens_ = (blocks + range_count_ - 1) / range_count_ * kBlockTokens;
    parts_.assign(geometry.kv_head_count * range_count_, AttendPart(rows, geometry.v_head_dim));
  }

  Status run(WorkerTeam& workers) {
    const size_t thread_count =
        std::min<size_t>(std::clamp(request_.thread_count, 1U, kMostThreads), parts_.size());
    workers.run(thread_count - 1, [this] { take_items(); });
    if (is_out_of_memory_) return {POLYKV_ERR_NO_MEMORY, "attend: out of memory"};
    if (is_beyond_fp32_) return beyond_fp32(layer_);
    return Status::ok();
  }

  std::span<const AttendPart> parts_of(uint32_t kv_head) const {
    return std::span(parts_).subspan(kv_head * range_count_, range_count_);
  }

 private:
  void take_items() noexcept {
    try {
      AttendScratch scratch;
      // Relaxed: it only hands out numbers; the team orders the rest.
      for (size_t item;
           (item = next_item_.fetch_add(1, std::memory_order_relaxed)) < parts_.size() &&
           !is_beyond_fp32_;)
        if (!attend_item(item, scratch).is_ok()) is_beyond_fp32_ = true;
    } catch (const std::bad_alloc&) {
      is_out_of_memory_ = true;
    }
  }

  Status attend_item(size_t item, AttendScratch& scratch) {
    const auto kv_head = static_cast<uint32_t>(item / range_count_);
    const uint64_t last = request_.first_token + request_.token_count;
    const uint64_t first = request_.first_token + item % range_count_ * range_tokens_;
    const auto attend_range = [&](const LeasedSegment& segment, uint64_t begin, uint64_t end) {
      const LayerView view = segment.view.layer(layer_);
      return attend_tokens(*codec_for(view.profile), view, kv_head, segment.first_token,
                           begin - segment.first_token, end - begin, queries_, parts_[item],
                           scratch)
                 ? Status::ok()
                 : beyond_fp32(layer_);
    };
    return for_each_range(segments_, first, std::min(first + range_tokens_, last), attend_range);
  }

  const LeasedSegments& segments_;
  uint32_t layer_;
  const AttendRequest& request_;
  const AttendQueries& queries_;
  uint64_t range_count_ = 1;
  uint64_t range_tokens_ = 0;
  std::vector<AttendPart> parts_;  // [kv_head, range]
  std::atomic<size_t> next_item_{0};
  std::atomic<bool> is_out_of_memory_{false};
  std::atomic<bool> is_beyond_fp32_{false};
};

}  // namespace

Status check_attend_request(const Lease& lease, uint32_t layer, const AttendRequest& request) {
  if (layer >= lease.layer_count())
    return wrong(layer, format("the document has %u layers", lease.layer_count()));
  POLYKV_RETURN_IF_ERROR(lease.check_readable("attend", request.first_token, request.token_count));
  const uint32_t kv_heads = lease.document().identity.layers[layer].kv_head_count;
  if (request.head_count == 0 || request.head_count % kv_heads != 0) {
    return wrong(layer, format("head_count %u is no multiple of its %u kv_heads",
                               request.head_count, kv_heads));
  }
  if (request.query_count == 0) return wrong(layer, "query_count is 0");
  if (uint64_t{request.query_count} * request.head_count > kMostRows) {
    return wrong(layer,
                 format("%u queries of %u heads are more than %" PRIu64 " rows; ask in parts",
                        request.query_count, request.head_count, kMostRows));
  }
  if (request.q == nullptr || request.output == nullptr)
    return wrong(layer, "q and output must not be NULL");
  if (!std::isfinite(request.scale) || !std::isfinite(request.soft_cap) || request.soft_cap < 0)
    return wrong(layer, "scale and soft_cap must be finite, and soft_cap not negative");
  return Status::ok();
}

float attend_scale(const AttendRequest& request, const LayerGeometry& geometry) {
  return request.scale != 0 ? request.scale
                            : 1.0F / std::sqrt(static_cast<float>(geometry.k_head_dim));
}

Status attend(const Lease& lease, uint32_t layer, const AttendRequest& request) {
  POLYKV_RETURN_IF_ERROR(check_attend_request(lease, layer, request));
  const LayerGeometry& geometry = lease.document().identity.layers[layer];
  POLYKV_ASSIGN_OR_RETURN(const std::vector<float> q, scaled_queries(layer, geometry, request));
  AttendQueries queries;
  queries.head_count = request.head_count;
  queries.row_count = request.query_count;
  queries.q = q.data();
  queries.soft_cap = request.soft_cap;
  queries.first_tokens = request.first_tokens;
  const auto segments = lease.segments();
  const auto fetch = [layer](const LeasedSegment& segment, uint64_t, uint64_t) {
    return segment.fetch_layer(layer).with_context("attend");
  };
  POLYKV_RETURN_IF_ERROR(for_each_range(*segments, request.first_token,
                                        request.first_token + request.token_count, fetch));
  Work work(*segments, layer, geometry, request, queries);
  POLYKV_RETURN_IF_ERROR(work.run(lease.workers()));

  // All of it before any of it is written: a call that fails leaves the caller's memory as it was.
  const uint32_t dim = geometry.v_head_dim;
  const uint32_t group = request.head_count / geometry.kv_head_count;
  const size_t row_count = size_t{request.head_count} * request.query_count;
  std::vector<float> outputs(row_count * dim);
  std::vector<float> log_sums(row_count);
  for (uint32_t head = 0; head < request.head_count; ++head) {
    for (uint32_t row = 0; row < request.query_count; ++row) {
      const size_t at = size_t{head} * request.query_count + row;
      float* output = &outputs[at * dim];
      log_sums[at] = join_parts(work.parts_of(head / group),
                                head % group * request.query_count + row, dim, output);
      if (!cpu::all_finite(output, dim)) return beyond_fp32(layer);
    }
  }
  const Strides strides = dense_unless_given(request.output_strides, request.head_count, dim);
  for (uint32_t head = 0; head < request.head_count; ++head) {
    for (uint32_t row = 0; row < request.query_count; ++row) {
      const size_t at = size_t{head} * request.query_count + row;
      store_row(request.output_dtype, &outputs[at * dim], request.output, strides, head, row, dim);
      if (request.log_sum_exp != nullptr)
        request.log_sum_exp[size_t{row} * request.head_count + head] = log_sums[at];
    }
  }
  return Status::ok();
}

}  // namespace polykv::lib
