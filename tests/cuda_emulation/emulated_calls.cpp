#include "tests/cuda_emulation/emulated_calls.h"

#include "kernels/cuda/attend_launcher.h"
#include "kernels/cuda/checksum_launcher.h"
#include "kernels/cuda/decode_launcher.h"
#include "kernels/cuda/encode_launcher.h"

namespace polykv::test {

Status run_encode(const KvSource& source, const LayerSlot& slot, const cuda::Workspace& workspace,
                  cuda::EncodeOutcome* outcome, const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::encode_with(launcher, source, slot, workspace, outcome);
}

Status run_decode(const LayerView& layer, const DecodeTarget& target, const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::decode_with(launcher, layer, target);
}

Status run_attend(const cuda::AttendCall& call, const cuda::Workspace& workspace,
                  uint32_t multiprocessor_count, const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::attend_with(launcher, call, workspace, multiprocessor_count);
}

Status run_checksum(std::span<const cuda::ChecksumRange> ranges, uint64_t* sums,
                    const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::checksum_with(launcher, ranges, sums);
}

}  // namespace polykv::test
