// Encoding a layer on a GPU: kernels read K and V where a model on that GPU left them and write the layer's payload into
// device memory; it then comes back to the host as well, for the checksum.
#pragma once

#include <span>

#include "kernels/codec.h"
#include "kernels/cuda/attend_call.h"
#include "libclient/cuda/opened_memory.h"

namespace polykv::lib {

/// What one call uses of the device. Of `workspace` as many bytes as encode_workspace_bytes() says.
struct EncodePlace {
  Gpu gpu;
  void* stream = nullptr;
  cuda::Workspace workspace;
  void* payload = nullptr;  // where the layer's payload goes; null: into the workspace
};

/// payload_bytes: of the layer if it goes into the workspace, else 0.
uint64_t encode_workspace_bytes(const LayerSlot& slot, uint64_t payload_bytes);

/// `slot` is in host memory, where `payload` is all of it, zero but for the slot's exact tokens. Waits for the stream;
/// afterwards payload, slot.scales and the device's payload are the encoded layer. Errors: those of
/// Codec::encode, and of the device.
Status encode_on_device(const KvSource& source, LayerSlot& slot, std::span<uint8_t> payload,
                        const EncodePlace& place);

}  // namespace polykv::lib
