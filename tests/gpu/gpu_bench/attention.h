// What 1 or 16 agents ask of a document, each one query of 32 heads: heads in groups of 4.
#pragma once

#include "kernels/cuda/launch.h"
#include "tests/gpu/gpu_bench/document.h"

namespace polykv::bench {

inline constexpr uint32_t kGroup = 4;
inline constexpr uint32_t kHeads = kGeometry.kv_head_count * kGroup;
inline constexpr uint32_t kMostAgents = 16;

class Attention {
 public:
  Attention(const BenchDocument& document, uint32_t multiprocessor_count);

  /// Queued on the default stream, one call.
  void attend(size_t layer, uint32_t agents, cuda::Products products);
  /// Of the last agent, against the processor's. Throws WrongResult.
  void verify_result(uint32_t agents, cuda::Products products);

 private:
  cuda::AttendCall call(std::span<const cuda::AttendRun> runs, uint32_t agents,
                        cuda::Products products) const;
  std::vector<float> attend_on_cpu(uint32_t agent) const;

  const BenchDocument& document_;
  uint32_t multiprocessor_count_;
  Buffer<uint16_t> q_;  // [agent, head, dim]
  Buffer<float> output_;
  std::vector<std::vector<cuda::AttendRun>> runs_;  // [layer]
  uint64_t workspace_bytes_ = 0;
  std::unique_ptr<Buffer<uint8_t>> workspace_;
};

}  // namespace polykv::bench
