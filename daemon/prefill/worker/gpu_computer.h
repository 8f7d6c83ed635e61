// Documents computed on a GPU: weights, K and V in its memory, which segments are encoded from. Of a polykvd that keeps its
// documents on that very GPU, K and V never leave it but for the examination of a segment, which the processor does.
#pragma once

#include "daemon/prefill/transformer/device_transformer.h"
#include "daemon/prefill/worker/computer.h"

namespace polykv {

/// The GPU that a worker computes on.
struct GpuPlace {
  DevicePlace place;
  device::DeviceInfo info;
};

class GpuComputer final : public Computer {
 public:
  /// documents_on_gpu: polykvd keeps its documents in this GPU's memory. thread_count: of the processor's part.
  GpuComputer(GpuPlace gpu, bool documents_on_gpu, uint32_t thread_count, std::string description)
      : gpu_(std::move(gpu)),
        documents_on_gpu_(documents_on_gpu),
        thread_count_(thread_count),
        description_(std::move(description)) {}

  const std::string& description() const override { return description_; }
  bool has_weights() const override { return transformer_ != nullptr; }
  Status take_weights(Weights weights, const Weights::Progress& progress) override;
  bool reads_sealed() const override { return true; }
  MemoryEstimate host_memory(const DocumentSize& size) const override;
  Status check_other_memory(const DocumentSize& size) const override;
  Result<std::unique_ptr<Computation>> begin(uint32_t token_count) override;

 private:
  GpuPlace gpu_;
  bool documents_on_gpu_;
  uint32_t thread_count_;
  std::string description_;
  std::unique_ptr<DeviceTransformer> transformer_;
};

}  // namespace polykv
