#include "libclient/cuda/encoding.h"

#include <cinttypes>

#include "kernels/cuda/encode_call.h"
#include "libclient/cuda/kernel_calls.h"
#include "libclient/cuda/on_device.h"

namespace polykv::lib {

namespace {

constexpr uint64_t kAlignment = 256;

uint64_t aligned(uint64_t size_bytes) {
  return (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

uint64_t encode_workspace_bytes(const LayerSlot& slot, uint64_t payload_bytes) {
  return aligned(sizeof(cuda::EncodeOutcome)) + aligned(payload_bytes) +
         cuda::encode_workspace_bytes(slot);
}

Status encode_on_device(const KvSource& source, LayerSlot& slot, std::span<uint8_t> payload,
                        const EncodePlace& place) {
  const uint64_t own_bytes = place.payload == nullptr ? payload.size() : 0;
  const uint64_t needed = encode_workspace_bytes(slot, own_bytes);
  if (place.workspace.data == nullptr || place.workspace.size_bytes < needed ||
      reinterpret_cast<uintptr_t>(place.workspace.data) % kAlignment != 0) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("a workspace of %" PRIu64 " bytes of device memory was given, %" PRIu64
                   " are needed, aligned to %" PRIu64,
                   place.workspace.size_bytes, needed, kAlignment)};
  }
  POLYKV_ASSIGN_OR_RETURN(cuda::Kernels* const kernels, client_kernels());
  device::Runtime& runtime = *place.gpu.runtime;
  POLYKV_RETURN_IF_ERROR(runtime.use_device(place.gpu.index));

  auto* const start = static_cast<uint8_t*>(place.workspace.data);
  auto* const outcome = reinterpret_cast<cuda::EncodeOutcome*>(start);
  uint8_t* next = start + aligned(sizeof *outcome);
  uint8_t* const device_payload =
      place.payload == nullptr ? next : static_cast<uint8_t*>(place.payload);
  next += aligned(own_bytes);
  const LayerSlot device_slot = on_device(slot, payload.data(), device_payload);
  // What the stream does up to here may still write to K, V and the workspace; what follows is not in its order.
  POLYKV_RETURN_IF_ERROR(runtime.synchronize_stream(place.stream));
  POLYKV_RETURN_IF_ERROR(runtime.zero(device_payload, payload.size()));
  if (slot.exact_row_count > 0) {
    POLYKV_RETURN_IF_ERROR(runtime.copy_to_device(device_slot.exact_tokens, slot.exact_tokens,
                                                  slot.exact_row_count * sizeof(uint32_t)));
  }
  const cuda::Workspace rest{next,
                             place.workspace.size_bytes - static_cast<uint64_t>(next - start)};
  const Status queued = kernels->encode(source, device_slot, rest, outcome, place.stream);
  // Also when not all of it could be queued: the workspace is the caller's again.
  POLYKV_RETURN_IF_ERROR(runtime.synchronize_stream(place.stream));
  POLYKV_RETURN_IF_ERROR(queued);
  cuda::EncodeOutcome done;
  POLYKV_RETURN_IF_ERROR(runtime.copy_to_host(&done, outcome, sizeof done));
  POLYKV_RETURN_IF_ERROR(cuda::encode_status(done, slot.profile, slot.source_dtype));
  slot.scales = done.scales;
  return runtime.copy_to_host(payload.data(), device_payload, payload.size());
}

}  // namespace polykv::lib
