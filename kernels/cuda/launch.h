// The device's counterparts of Codec::encode, Codec::decode, attend_tokens and a layer's checksum: they check what they
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
#include "kernels/cuda/attend_call.h"
#include "kernels/cuda/checksum_call.h"
#include "kernels/cuda/encode_call.h"

namespace polykv::cuda {

/// As Codec::encode: `slot`'s bytes are zero but for its exact_tokens. `workspace` has
/// encode_workspace_bytes(slot). Once the stream has come so far, `outcome` (the device's) says what
/// encode_status() makes of it, and holds the scales for the layer's record.
Status encode(const KvSource& source, const LayerSlot& slot, const Workspace& workspace,
              EncodeOutcome* outcome, void* stream);

/// As Codec::decode: tokens [first_token, first_token + token_count) of a layer of any profile into
/// `target`, whose k and v may be null.
Status decode(const LayerView& layer, const DecodeTarget& target, void* stream);

/// Softmax attention of query rows to tokens of a document. `workspace` has at least
/// plan_attend(call, multiprocessor_count).workspace_bytes. A row that sees no token gets zeros and a
/// log-sum-exp of minus infinity; one with a logit that is no finite number gets NaN in both. Equal
/// calls give equal bits.
Status attend(const AttendCall& call, const Workspace& workspace, uint32_t multiprocessor_count,
              void* stream);

/// sums[i] (the device's): XXH3-64 of ranges[i].
Status checksum(std::span<const ChecksumRange> ranges, uint64_t* sums, void* stream);

}  // namespace polykv::cuda
