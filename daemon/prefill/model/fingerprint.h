// The model fingerprint: which configuration and which weights, whatever the file is called.
//
//   BLAKE2b-256("polykv model 1", configuration, tensor count,
//               then sorted by name: name, type name, dimensions, BLAKE2b-256(bytes of the tensor))
//
// The tokenizer is no part of it: a document's identity holds its token ids.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/model/model.h"

namespace polykv {

/// Digest of the configuration alone: what a weights cache file is checked against.
Digest config_digest(const ModelConfig& config);

/// `tensor_digests[i]` is that of gguf.tensors()[i]'s bytes.
Digest combine_fingerprint(const Model& model, std::span<const Digest> tensor_digests);

/// Reads a tensor's bytes once, in pieces of whole rows, hashes them and hands each piece to
/// `consume` (may be empty).
Result<Digest> read_and_hash_tensor(const FileSource& file, const TensorInfo& tensor,
                                    const std::function<void(uint64_t first_row, uint64_t row_count,
                                                             std::span<const uint8_t>)>& consume);

}  // namespace polykv
