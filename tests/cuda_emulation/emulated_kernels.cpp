// The kernels of libpolykv_cuda_emulated.so: on the calling thread, at once. The emulated GPU is told that their stream is
// busy all the same, so that who does not wait for it is found.
#include <mutex>

#include "kernels/cuda/library.h"
#include "tests/cuda_emulation/emulated_calls.h"

namespace polykv::test {

extern "C" void polykv_emulated_keep_busy(void* stream, const void* pointer);

namespace {

constexpr uint32_t kMultiprocessors = 4;

class EmulatedKernels final : public cuda::Kernels {
 public:
  Status encode(const KvSource& source, const LayerSlot& slot, const cuda::Workspace& workspace,
                cuda::EncodeOutcome* outcome, void* stream) override {
    const std::lock_guard lock(mutex_);
    polykv_emulated_keep_busy(stream, outcome);
    return run_encode(source, slot, workspace, outcome);
  }
  Status decode(const LayerView& layer, const DecodeTarget& target, void* stream) override {
    const std::lock_guard lock(mutex_);
    polykv_emulated_keep_busy(stream, layer.blocks);
    return run_decode(layer, target);
  }
  Result<uint64_t> attend_workspace_bytes(const cuda::AttendCall& call) override {
    return cuda::plan_attend(call, kMultiprocessors).workspace_bytes;
  }
  Status attend(const cuda::AttendCall& call, const cuda::Workspace& workspace,
                void* stream) override {
    const std::lock_guard lock(mutex_);
    for (const cuda::AttendRun& run : call.runs)
      polykv_emulated_keep_busy(stream, run.layer.blocks);
    return run_attend(call, workspace, kMultiprocessors);
  }
  Status checksum(std::span<const cuda::ChecksumRange> ranges, uint64_t* sums, void*) override {
    const std::lock_guard lock(mutex_);
    return run_checksum(ranges, sums);
  }

 private:
  std::mutex mutex_;  // the emulation is for one thread
};

}  // namespace

extern "C" __attribute__((visibility("default"))) cuda::Kernels* polykv_device_kernels(
    uint32_t version) {
  static EmulatedKernels kernels;
  return version == cuda::kKernelsVersion ? &kernels : nullptr;
}

}  // namespace polykv::test
