// kernels/cuda/launch.h, run by the emulation on host memory.
#pragma once

#include "common/result.h"
#include "kernels/codec.h"
#include "tests/cuda_emulation/emulation.h"

namespace polykv::test {

/// A failure of the emulation is POLYKV_ERR_INTERNAL.
Status emulated_decode(const LayerView& layer, const DecodeTarget& target,
                       const Schedule& schedule);

}  // namespace polykv::test
