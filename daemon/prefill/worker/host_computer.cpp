#include "daemon/prefill/worker/host_computer.h"

#include <cassert>

#include "daemon/prefill/transformer/last_queries.h"
#include "daemon/prefill/worker/each_layer.h"

namespace polykv {

namespace {

class HostComputation final : public Computation {
 public:
  HostComputation(Transformer& transformer, KvCache cache, uint32_t thread_count)
      : transformer_(transformer),
        cache_(std::move(cache)),
        queries_(transformer.config()),
        thread_count_(thread_count) {}

  uint32_t token_count() const override { return cache_.token_count(); }

  Status take_layer(const lib::Lease& sealed, uint32_t layer, uint32_t token_count) override {
    lib::DecodeRequest request;
    request.token_count = token_count;
    request.k_strides = request.v_strides = strides();
    request.k = cache_.k(layer);
    request.v = cache_.v(layer);
    return sealed.decode(layer, request);
  }
  void set_token_count(uint32_t token_count) override { cache_.set_token_count(token_count); }

  Status forward(std::span<const uint32_t> ids, ForwardOptions options) override {
    options.after_rope = [this](const LayerRows& rows) { queries_.keep(rows); };
    return transformer_.forward(ids, cache_, {}, options);
  }

  Status publish(lib::Publisher& publisher, uint64_t token_count) override {
    const uint64_t first = publisher.next_token();
    const auto examine = [&](uint32_t layer, uint32_t) {
      return publisher.examine_layer(token_count, layer, source(layer, first),
                                     queries_.of(layer, first));
    };
    POLYKV_RETURN_IF_ERROR(for_each_layer(cache_.layer_count(), thread_count_, examine));
    POLYKV_ASSIGN_OR_RETURN(const std::unique_ptr<lib::OpenSegment> segment,
                            publisher.begin_segment(token_count));
    const auto encode = [&](uint32_t layer, uint32_t) {
      return segment->encode_layer(layer, source(layer, first));
    };
    POLYKV_RETURN_IF_ERROR(for_each_layer(cache_.layer_count(), thread_count_, encode));
    return segment->commit();
  }

 private:
  Strides strides() const {
    return {static_cast<int64_t>(cache_.head_stride()), static_cast<int64_t>(cache_.token_stride()),
            1};
  }
  KvSource source(uint32_t layer, uint64_t first_token) const {
    const size_t at = first_token * cache_.token_stride();
    return {Dtype::f32, cache_.k(layer) + at, strides(), cache_.v(layer) + at, strides()};
  }

  Transformer& transformer_;
  KvCache cache_;
  LastQueries queries_;
  uint32_t thread_count_;
};

}  // namespace

Status HostComputer::take_weights(Weights weights, const Weights::Progress& /*progress*/) {
  transformer_ = std::make_unique<Transformer>(std::make_shared<const Weights>(std::move(weights)));
  return Status::ok();
}

MemoryEstimate HostComputer::host_memory(const DocumentSize& size) const {
  MemoryEstimate estimate =
      estimate_memory(size.config, size.tied_output, size.token_count, kPrefillChunkTokens);
  // Each thread tries the encoding of a layer; at worst of all its K and V in fp32.
  estimate.scratch_bytes +=
      LastQueries::size_bytes(size.config) + KvCache::size_bytes(size.config, size.segment_tokens) /
                                                 size.config.layer_count * thread_count_;
  return estimate;
}

Result<std::unique_ptr<Computation>> HostComputer::begin(uint32_t token_count) {
  assert(has_weights());
  POLYKV_ASSIGN_OR_RETURN(KvCache cache, KvCache::create(transformer_->config(), token_count));
  return std::unique_ptr<Computation>(
      std::make_unique<HostComputation>(*transformer_, std::move(cache), thread_count_));
}

}  // namespace polykv
