// Documents computed on the processor, in host memory.
#pragma once

#include "daemon/prefill/transformer/transformer.h"
#include "daemon/prefill/worker/computer.h"

namespace polykv {

class HostComputer final : public Computer {
 public:
  /// documents_on_gpu: polykvd keeps its documents in a GPU's memory. description: what multiplies, see Computer.
  HostComputer(bool documents_on_gpu, uint32_t thread_count, std::string description)
      : documents_on_gpu_(documents_on_gpu),
        thread_count_(thread_count),
        description_(std::move(description)) {}

  const std::string& description() const override { return description_; }
  bool has_weights() const override { return transformer_ != nullptr; }
  Status take_weights(Weights weights, const Weights::Progress& progress) override;
  bool reads_sealed() const override { return !documents_on_gpu_; }
  MemoryEstimate host_memory(const DocumentSize& size) const override;
  Status check_other_memory(const DocumentSize&) const override { return Status::ok(); }
  Result<std::unique_ptr<Computation>> begin(uint32_t token_count) override;

 private:
  bool documents_on_gpu_;
  uint32_t thread_count_;
  std::string description_;
  std::unique_ptr<Transformer> transformer_;
};

}  // namespace polykv
