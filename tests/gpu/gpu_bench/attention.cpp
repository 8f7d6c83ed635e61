#include "tests/gpu/gpu_bench/attention.h"

#include <algorithm>
#include <cmath>

#include "kernels/attend.h"

namespace polykv::bench {

namespace {

constexpr size_t kAgentValues = size_t{kHeads} * kGeometry.k_head_dim;
const float kScale = 1.0F / std::sqrt(static_cast<float>(kGeometry.k_head_dim));

}  // namespace

Attention::Attention(const BenchDocument& document, uint32_t multiprocessor_count)
    : document_(document),
      multiprocessor_count_(multiprocessor_count),
      q_(random_halves(kMostAgents * kAgentValues, 3)),
      output_(kMostAgents * kAgentValues) {
  for (size_t layer = 0; layer < document.layer_count(); ++layer)
    runs_.push_back(document.runs(layer));
  for (const cuda::Products products : {cuda::Products::scalar, cuda::Products::tensor}) {
    const cuda::AttendPlan plan =
        cuda::plan_attend(call(runs_[0], kMostAgents, products), multiprocessor_count);
    workspace_bytes_ = std::max(workspace_bytes_, plan.workspace_bytes);
  }
  workspace_ = std::make_unique<Buffer<uint8_t>>(workspace_bytes_);
}

cuda::AttendCall Attention::call(std::span<const cuda::AttendRun> runs, uint32_t agents,
                                 cuda::Products products) const {
  cuda::AttendCall call;
  call.runs = runs;
  call.query_count = agents;
  call.head_count = kHeads;
  call.query_dtype = Dtype::f16;
  call.q = q_.get();
  call.q_strides = {kAgentValues, kGeometry.k_head_dim, 1};
  call.scale = kScale;
  call.output = output_.get();
  call.output_strides = call.q_strides;
  call.products = products;
  return call;
}

void Attention::attend(size_t layer, uint32_t agents, cuda::Products products) {
  check(cuda::attend(call(runs_[layer], agents, products), {workspace_->get(), workspace_bytes_},
                     multiprocessor_count_, nullptr));
}

std::vector<float> Attention::attend_on_cpu(uint32_t agent) const {
  const std::vector<float> all = as_floats(q_.host());
  const auto begin = all.begin() + static_cast<int64_t>(agent * kAgentValues);
  std::vector<float> q(begin, begin + kAgentValues);
  for (float& value : q) value *= kScale;
  AttendQueries queries;
  queries.head_count = kHeads;
  queries.row_count = 1;
  queries.q = q.data();
  std::vector<float> output(kAgentValues);
  AttendScratch scratch;
  for (uint32_t kv_head = 0; kv_head < kGeometry.kv_head_count; ++kv_head) {
    std::vector<AttendPart> parts{AttendPart(kGroup, kGeometry.v_head_dim)};
    uint64_t first_token = 0;
    for (const LayerView& layer : document_.host_views()) {
      if (!attend_tokens(*codec_for(layer.profile), layer, kv_head, first_token, 0,
                         layer.token_count, queries, parts[0], scratch))
        check(Status(POLYKV_ERR_INTERNAL, "attend on the CPU: a logit is beyond fp32"));
      first_token += layer.token_count;
    }
    for (uint32_t row = 0; row < kGroup; ++row) {
      join_parts(parts, row, kGeometry.v_head_dim,
                 &output[(size_t{kv_head} * kGroup + row) * kGeometry.v_head_dim]);
    }
  }
  return output;
}

void Attention::verify_result(uint32_t agents, cuda::Products products) {
  const std::vector<float> want = attend_on_cpu(agents - 1);
  output_.spoil();
  workspace_->spoil();
  attend(document_.layer_count() - 1, agents, products);
  check(cudaDeviceSynchronize(), "attend");
  const std::vector<float> outputs = output_.host();
  const auto begin = outputs.begin() + static_cast<int64_t>((agents - 1) * kAgentValues);
  const double error = relative_error(std::vector<float>(begin, begin + kAgentValues), want);
  verify(error < 5e-3, products == cuda::Products::scalar ? "attend" : "attend by tensor cores",
         error);
}

}  // namespace polykv::bench
