// kernels/cuda/launch.h on host memory, for tests: what a call touches is copied to a device and back.
// device_calls_emulated.cpp has the emulation for a device, device_calls_cuda.cpp a real one, which has
// schedules of its own.
#pragma once

#include "common/result.h"
#include "kernels/codec.h"
#include "kernels/cuda/attend_call.h"
#include "kernels/cuda/checksum_call.h"
#include "kernels/cuda/encode_call.h"
#include "tests/cuda_emulation/emulation.h"

namespace polykv::test {

/// A failure of the emulation is POLYKV_ERR_INTERNAL.
Status device_decode(const LayerView& layer, const DecodeTarget& target, const Schedule& schedule);
/// With a workspace of exactly the planned size, full of NaN.
Status device_attend(const cuda::AttendCall& call, uint32_t multiprocessor_count,
                     const Schedule& schedule);
/// As Codec::encode: with the slot's scales filled in from the outcome.
Status device_encode(const KvSource& source, LayerSlot& slot, const Schedule& schedule);
/// sums: [range].
Status device_checksum(std::span<const cuda::ChecksumRange> ranges, uint64_t* sums,
                       const Schedule& schedule);

}  // namespace polykv::test
