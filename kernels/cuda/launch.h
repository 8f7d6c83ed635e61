// The device's counterparts of Codec::encode, Codec::decode and attend_tokens: they check what they
// are given, choose the shape of a launch and queue kernels on the caller's stream.
//
// Pointers inside layers, targets and sources are the device's. Nothing is allocated and nothing waited for: an
// error of the device comes with a later call of the CUDA runtime, as usual. The context of the
// device is current, `stream` is a cudaStream_t of it. Different streams may be used at once.
//
// Errors, with nothing queued: POLYKV_ERR_UNSUPPORTED (a head_dim above 256), POLYKV_ERR_INVALID_ARGUMENT
// (a range outside the layer, an unknown dtype), POLYKV_ERR_LIMIT (more thread blocks than a grid
// has), POLYKV_ERR_SYSTEM (the launch failed; the message has the runtime's words).
#pragma once

#include "common/result.h"
#include "kernels/codec.h"

namespace polykv::cuda {

/// As Codec::decode: tokens [first_token, first_token + token_count) of a layer of any profile into
/// `target`, whose k and v may be null.
Status decode(const LayerView& layer, const DecodeTarget& target, void* stream);

}  // namespace polykv::cuda
