// Encoding on the device, as the caller asks for it.
#pragma once

#include <cstdint>

#include "common/result.h"
#include "kernels/codec.h"

namespace polykv::cuda {

inline constexpr uint32_t kNoBadToken = 0xffffffffU;

/// What became of encoding a layer. In the device's memory: the caller copies it back when the stream
/// has come so far.
struct EncodeOutcome {
  LayerScales scales;  // for the layer's record
  // The first value of K, then of V, that the profile cannot hold.
  struct {
    uint32_t token;  // kNoBadToken: all fit
    uint32_t kv_head;
    float value;
  } bad[2];
};

/// POLYKV_ERR_INVALID_ARGUMENT naming K or V, token and kv_head, as Codec::encode has it. What was
/// written is of no use then.
Status encode_status(const EncodeOutcome& outcome, Profile profile, Dtype stored_dtype);

uint64_t encode_workspace_bytes(const LayerSlot& slot);
/// What encode() refuses.
Status check_encode(const KvSource& source, const LayerSlot& slot);

}  // namespace polykv::cuda
