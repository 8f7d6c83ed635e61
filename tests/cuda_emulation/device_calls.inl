// device_calls.h for a device. Before it is included:
//
//   class Memory                               as device_staging.h has it, full of ones when it is new
//   Status run_decode(layer, target, schedule), run_attend(call, workspace, multiprocessors, schedule),
//   run_encode(source, slot, workspace, outcome, schedule), run_checksum(ranges, sums, schedule)    the calls of launch.h; they return when the work is done

#include "tests/cuda_emulation/device_staging.h"

namespace polykv::test {

Status device_decode(const LayerView& layer, const DecodeTarget& target, const Schedule& schedule) {
  // What will be refused is not copied: its sizes mean nothing.
  if (target.token_count > layer.token_count ||
      !dtype_is_valid(static_cast<uint32_t>(target.dtype)))
    return run_decode(layer, target, schedule);
  Staging<Memory> inputs;
  Staging<Memory> results;
  POLYKV_RETURN_IF_ERROR(
      run_decode(inputs.layer(layer), stage(results, layer.geometry, target), schedule));
  results.download();
  return Status::ok();
}

Status device_attend(const cuda::AttendCall& call, uint32_t multiprocessor_count,
                     const Schedule& schedule) {
  POLYKV_RETURN_IF_ERROR(cuda::check_attend(call));
  Staging<Memory> staging;
  std::vector<cuda::AttendRun> runs;
  const cuda::AttendCall staged = stage(staging, call, runs);
  Memory workspace(cuda::plan_attend(call, multiprocessor_count).workspace_bytes);
  POLYKV_RETURN_IF_ERROR(run_attend(staged, {workspace.data(), workspace.size_bytes()},
                                    multiprocessor_count, schedule));
  staging.download();
  return Status::ok();
}

Status device_encode(const KvSource& source, LayerSlot& slot, const Schedule& schedule) {
  POLYKV_RETURN_IF_ERROR(cuda::check_encode(source, slot));
  Staging<Memory> inputs;
  Staging<Memory> results;
  const KvSource staged_source = stage(inputs, slot.geometry, slot.token_count, source);
  const LayerSlot staged_slot = results.layer(slot);
  Memory workspace(cuda::encode_workspace_bytes(slot));
  Memory outcome_memory(sizeof(cuda::EncodeOutcome));
  POLYKV_RETURN_IF_ERROR(
      run_encode(staged_source, staged_slot, {workspace.data(), workspace.size_bytes()},
                 static_cast<cuda::EncodeOutcome*>(outcome_memory.data()), schedule));
  results.download();
  cuda::EncodeOutcome outcome;
  outcome_memory.download(&outcome, sizeof outcome);
  slot.scales = outcome.scales;
  return cuda::encode_status(outcome, slot.profile, slot.source_dtype);
}

Status device_checksum(std::span<const cuda::ChecksumRange> ranges, uint64_t* sums,
                       const Schedule& schedule) {
  POLYKV_RETURN_IF_ERROR(cuda::check_checksum(ranges, sums));
  Staging<Memory> inputs;
  std::vector<cuda::ChecksumRange> staged(ranges.begin(), ranges.end());
  for (cuda::ChecksumRange& range : staged) range.data = inputs.array(range.data, range.size_bytes);
  Memory results(ranges.size() * sizeof *sums);
  POLYKV_RETURN_IF_ERROR(run_checksum(staged, static_cast<uint64_t*>(results.data()), schedule));
  results.download(sums, results.size_bytes());
  return Status::ok();
}

}  // namespace polykv::test
