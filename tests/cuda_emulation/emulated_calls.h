// The calls of kernels/cuda/launch.h on the emulation, under a schedule, with memory of this process for the device's.
// The kernels are compiled for the emulation here alone. They return when the work is done; a failure of the emulation
// is POLYKV_ERR_INTERNAL.
#pragma once

#include <cstdint>
#include <span>

#include "common/result.h"
#include "kernels/codec.h"
#include "kernels/cuda/attend_call.h"
#include "kernels/cuda/checksum_call.h"
#include "kernels/cuda/encode_call.h"
#include "tests/cuda_emulation/emulation.h"

namespace polykv::test {

Status run_encode(const KvSource& source, const LayerSlot& slot, const cuda::Workspace& workspace,
                  cuda::EncodeOutcome* outcome, const Schedule& schedule = {});
Status run_decode(const LayerView& layer, const DecodeTarget& target,
                  const Schedule& schedule = {});
Status run_attend(const cuda::AttendCall& call, const cuda::Workspace& workspace,
                  uint32_t multiprocessor_count, const Schedule& schedule = {});
Status run_checksum(std::span<const cuda::ChecksumRange> ranges, uint64_t* sums,
                    const Schedule& schedule = {});

}  // namespace polykv::test
