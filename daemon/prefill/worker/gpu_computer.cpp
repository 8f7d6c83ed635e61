#include "daemon/prefill/worker/gpu_computer.h"

#include <algorithm>
#include <cassert>
#include <vector>

#include "daemon/prefill/transformer/kv_cache.h"
#include "daemon/prefill/transformer/last_queries.h"
#include "daemon/prefill/transformer/tensor_pass.h"
#include "daemon/prefill/worker/each_layer.h"
#include "daemon/prefill/worker/free_memory.h"
#include "kernels/cuda/launch_rules.h"
#include "libclient/cuda/kernel_calls.h"

namespace polykv {

namespace {

constexpr DevicePassSettings kSettings = {.query_rows = kCertificateQueries};

/// K and V of one layer in host memory: [kv_head, token, head_dim], dense.
struct HostLayer {
  std::vector<float> k;
  std::vector<float> v;
};

/// What there are kernels for; the rest is encoded on the processor, from copies.
bool can_encode(const lib::Publisher& publisher) {
  const LayerGeometry& geometry = publisher.identity().layers.front();  // all are alike
  // Those that `auto` chooses from have kernels for the same shapes.
  const Profile profile =
      publisher.profile() == Profile::automatic ? Profile::k5v4 : publisher.profile();
  return cuda::check_layer_shape("encode", profile, geometry).is_ok();
}

class GpuComputation final : public Computation {
 public:
  GpuComputation(DeviceTransformer& transformer, const GpuPlace& gpu, DeviceKvCache cache,
                 bool documents_on_gpu, uint32_t thread_count)
      : transformer_(transformer),
        gpu_(gpu),
        cache_(std::move(cache)),
        queries_(transformer.config()),
        documents_on_gpu_(documents_on_gpu),
        thread_count_(thread_count) {}
  ~GpuComputation() override { release_unused(gpu_.place.torch); }

  uint32_t token_count() const override { return cache_.token_count(); }
  Status take_layer(const lib::Lease& sealed, uint32_t layer, uint32_t token_count) override;
  void set_token_count(uint32_t token_count) override { cache_.set_token_count(token_count); }
  Status forward(std::span<const uint32_t> ids, ForwardOptions options) override {
    options.after_rope = [this](const LayerRows& rows) { queries_.keep(rows); };
    return transformer_.forward(ids, cache_, {}, options);
  }
  Status publish(lib::Publisher& publisher, uint64_t token_count) override;

 private:
  Status take_through_host(const lib::Lease& sealed, uint32_t layer, uint32_t token_count);
  Strides dense(uint64_t token_count) const {
    const auto dim = static_cast<int64_t>(cache_.shape().head_dim);
    return {static_cast<int64_t>(token_count) * dim, dim, 1};
  }
  Strides strides() const {
    return {static_cast<int64_t>(cache_.head_stride()), static_cast<int64_t>(cache_.token_stride()),
            1};
  }
  /// Calls action with K and V of each layer in host memory, on several threads.
  Status for_each_on_host(uint64_t first, uint64_t count,
                          const std::function<Status(uint32_t, const KvSource&)>& action);
  Status encode_here(lib::OpenSegment& segment);

  DeviceTransformer& transformer_;
  const GpuPlace& gpu_;
  DeviceKvCache cache_;
  LastQueries queries_;
  bool documents_on_gpu_;
  uint32_t thread_count_;
};

Status GpuComputation::take_layer(const lib::Lease& sealed, uint32_t layer, uint32_t token_count) {
  if (!documents_on_gpu_) return take_through_host(sealed, layer, token_count);
  lib::DecodeRequest request;
  request.token_count = token_count;
  request.k_strides = request.v_strides = strides();
  request.k = cache_.k(layer);
  request.v = cache_.v(layer);
  // On the stream that torch uses: what reads them comes behind it.
  return lib::decode_on_device(sealed, layer, request, {gpu_.place.index, nullptr});
}

Status GpuComputation::take_through_host(const lib::Lease& sealed, uint32_t layer,
                                         uint32_t token_count) {
  const CacheShape& shape = cache_.shape();
  HostLayer part;
  for (uint32_t first = 0; first < token_count; first += lib::kSegmentTokens) {
    const auto count =
        static_cast<uint32_t>(std::min<uint64_t>(lib::kSegmentTokens, token_count - first));
    part.k.resize(size_t{shape.kv_head_count} * count * shape.head_dim);
    part.v.resize(part.k.size());
    lib::DecodeRequest request;
    request.first_token = first;
    request.token_count = count;
    request.k_strides = request.v_strides = dense(count);
    request.k = part.k.data();
    request.v = part.v.data();
    POLYKV_RETURN_IF_ERROR(sealed.decode(layer, request));
    POLYKV_RETURN_IF_ERROR(
        cache_.copy_layer_from_host(layer, first, count, part.k.data(), part.v.data()));
  }
  return Status::ok();
}

Status GpuComputation::for_each_on_host(
    uint64_t first, uint64_t count,
    const std::function<Status(uint32_t, const KvSource&)>& action) {
  const CacheShape& shape = cache_.shape();
  std::vector<HostLayer> layers(thread_count_);
  return for_each_layer(shape.layer_count, thread_count_, [&](uint32_t layer, uint32_t thread) {
    HostLayer& host = layers[thread];
    host.k.resize(shape.kv_head_count * count * shape.head_dim);
    host.v.resize(host.k.size());
    POLYKV_RETURN_IF_ERROR(cache_.copy_layer_to_host(layer, static_cast<uint32_t>(first),
                                                     static_cast<uint32_t>(count), host.k.data(),
                                                     host.v.data()));
    return action(layer, {Dtype::f32, host.k.data(), dense(count), host.v.data(), dense(count)});
  });
}

/// A layer after the other, each by kernels that use all of the GPU.
Status GpuComputation::encode_here(lib::OpenSegment& segment) {
  const uint32_t layer_count = cache_.shape().layer_count;
  uint64_t workspace_bytes = 0;
  for (uint32_t layer = 0; layer < layer_count; ++layer) {
    POLYKV_ASSIGN_OR_RETURN(const uint64_t bytes, segment.device_workspace_bytes(layer));
    workspace_bytes = std::max(workspace_bytes, bytes);
  }
  POLYKV_ASSIGN_OR_RETURN(const DeviceMemory workspace,
                          DeviceMemory::allocate(gpu_.place, workspace_bytes, "encoding a layer"));
  lib::EncodePlace place;
  place.gpu = {gpu_.place.runtime, gpu_.place.index, gpu_.info};
  place.workspace = {workspace.pointer(), workspace.size_bytes()};
  const size_t at = segment.first_token() * cache_.token_stride();
  for (uint32_t layer = 0; layer < layer_count; ++layer) {
    // It waits for torch's stream first, the default one, and returns when the layer is encoded.
    POLYKV_RETURN_IF_ERROR(segment.encode_layer_on_device(
        layer, {Dtype::f32, cache_.k(layer) + at, strides(), cache_.v(layer) + at, strides()},
        place));
  }
  return Status::ok();
}

Status GpuComputation::publish(lib::Publisher& publisher, uint64_t token_count) {
  const uint64_t first = publisher.next_token();
  POLYKV_RETURN_IF_ERROR(
      for_each_on_host(first, token_count, [&](uint32_t layer, const KvSource& source) {
        return publisher.examine_layer(token_count, layer, source, queries_.of(layer, first));
      }));
  const bool encodes_here = can_encode(publisher);
  POLYKV_ASSIGN_OR_RETURN(const std::unique_ptr<lib::OpenSegment> segment,
                          publisher.begin_segment(token_count, encodes_here && documents_on_gpu_));
  if (encodes_here) {
    POLYKV_RETURN_IF_ERROR(encode_here(*segment));
  } else {
    POLYKV_RETURN_IF_ERROR(
        for_each_on_host(first, token_count, [&](uint32_t layer, const KvSource& source) {
          return segment->encode_layer(layer, source);
        }));
  }
  return segment->commit();
}

}  // namespace

Status GpuComputer::take_weights(Weights weights, const Weights::Progress& progress) {
  POLYKV_ASSIGN_OR_RETURN(transformer_,
                          DeviceTransformer::create(weights, gpu_.place, kSettings, progress));
  return Status::ok();
}

/// The weights until they are on the GPU, and a layer for each thread that examines: as it was computed, and encoded.
MemoryEstimate GpuComputer::host_memory(const DocumentSize& size) const {
  const uint64_t layer_bytes =
      KvCache::size_bytes(size.config, size.segment_tokens) / size.config.layer_count;
  MemoryEstimate estimate;
  estimate.weights_bytes = has_weights() ? 0 : weights_bytes(size.config, size.tied_output);
  estimate.scratch_bytes = LastQueries::size_bytes(size.config) + 2 * layer_bytes * thread_count_;
  // The segment in the making, whose payloads are copied back for their checksums: at most as large as its K and V.
  estimate.scratch_bytes += layer_bytes * size.config.layer_count;
  return estimate;
}

Status GpuComputer::check_other_memory(const DocumentSize& size) const {
  POLYKV_RETURN_IF_ERROR(gpu_.place.runtime->use_device(gpu_.place.index));
  POLYKV_ASSIGN_OR_RETURN(const device::MemoryInfo memory, gpu_.place.runtime->memory());
  MemoryEstimate estimate = estimate_device_memory(size.config, size.tied_output, size.token_count,
                                                   kPrefillChunkTokens, kSettings);
  if (has_weights()) estimate.weights_bytes = 0;
  // A layer's payload and what its encoding needs besides, each at most as large as its K and V.
  estimate.scratch_bytes += device::round_up(
      2 * KvCache::size_bytes(size.config, size.segment_tokens) / size.config.layer_count);
  const uint64_t needed = estimate.total_bytes();
  if (needed <= memory.free_bytes) return Status::ok();
  return {
      POLYKV_ERR_BUDGET,
      format("ingest: prefilling %u tokens on %s needs %s more of its memory (weights %s, cache "
             "%s, scratch %s), but %s are free; free memory on the GPU, cut the document or set "
             "worker.device to cpu",
             size.token_count, gpu_.info.name.c_str(), mebibytes(needed).c_str(),
             mebibytes(estimate.weights_bytes).c_str(), mebibytes(estimate.kv_cache_bytes).c_str(),
             mebibytes(estimate.scratch_bytes).c_str(), mebibytes(memory.free_bytes).c_str())};
}

Result<std::unique_ptr<Computation>> GpuComputer::begin(uint32_t token_count) {
  assert(has_weights());
  POLYKV_ASSIGN_OR_RETURN(DeviceKvCache cache,
                          DeviceKvCache::create(gpu_.place, transformer_->config(), token_count));
  return std::unique_ptr<Computation>(std::make_unique<GpuComputation>(
      *transformer_, gpu_, std::move(cache), documents_on_gpu_, thread_count_));
}

}  // namespace polykv
