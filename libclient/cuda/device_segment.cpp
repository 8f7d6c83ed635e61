#include "libclient/cuda/device_segment.h"

#include <xxhash.h>

#include <algorithm>
#include <memory>

namespace polykv::lib {

namespace {
/// Verifying takes this much host memory, whatever the size of a layer.
constexpr uint64_t kPieceBytes = uint64_t{4} << 20;

struct FreeState {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};
}  // namespace

Status DeviceSegment::open_locked() {
  // A daemon that is gone, or whose GPU is lost, has taken what it exported along.
  POLYKV_RETURN_IF_ERROR(session_->check_connected("use device memory"));
  if (opened_) {
    // Each thread has a current device of its own.
    return opened_->gpu().runtime->use_device(opened_->gpu().index);
  }
  POLYKV_ASSIGN_OR_RETURN(device::Runtime* const runtime,
                          client_runtime(session_->device_driver()));
  POLYKV_ASSIGN_OR_RETURN(const Gpu gpu, find_gpu(*runtime, memory_.device_uuid));
  POLYKV_ASSIGN_OR_RETURN(OpenedMemory opened, OpenedMemory::open(gpu, memory_));
  opened_.emplace(std::move(opened));
  return gpu.runtime->use_device(gpu.index);
}

Result<DeviceSegment::View> DeviceSegment::open() {
  const std::lock_guard lock(mutex_);
  POLYKV_RETURN_IF_ERROR(open_locked());
  return View{opened_->pointer(), opened_->gpu()};
}

Status DeviceSegment::fetch_layer(uint32_t layer, const LayerRecord& record) {
  const std::lock_guard lock(mutex_);
  if (is_fetched_[layer]) return Status::ok();
  POLYKV_RETURN_IF_ERROR(open_locked());
  POLYKV_RETURN_IF_ERROR(image_.fetch(*opened_->gpu().runtime, opened_->pointer(),
                                      record.payload_offset, record.payload_bytes));
  // If the exporter died meanwhile, nobody knows what was copied.
  POLYKV_RETURN_IF_ERROR(session_->check_connected("use device memory"));
  is_fetched_[layer] = true;
  return Status::ok();
}

Status DeviceSegment::verify_layer(uint32_t layer, const LayerRecord& record) {
  const std::lock_guard lock(mutex_);
  POLYKV_RETURN_IF_ERROR(open_locked());
  const auto* const payload =
      static_cast<const uint8_t*>(opened_->pointer()) + (record.payload_offset - data_offset_);
  const std::unique_ptr<XXH3_state_t, FreeState> state(XXH3_createState());
  if (state == nullptr) return {POLYKV_ERR_NO_MEMORY, "verify: out of memory"};
  XXH3_64bits_reset(state.get());
  std::vector<uint8_t> piece(std::min(kPieceBytes, record.payload_bytes));
  for (uint64_t done = 0; done < record.payload_bytes;) {
    const uint64_t count = std::min<uint64_t>(piece.size(), record.payload_bytes - done);
    POLYKV_RETURN_IF_ERROR(
        opened_->gpu().runtime->copy_to_host(piece.data(), payload + done, count));
    XXH3_64bits_update(state.get(), piece.data(), count);
    done += count;
  }
  POLYKV_RETURN_IF_ERROR(session_->check_connected("use device memory"));
  if (XXH3_64bits_digest(state.get()) == record.payload_checksum) return Status::ok();
  return {POLYKV_ERR_CORRUPT,
          format("layer %u: its payload in device memory does not match its checksum; a process "
                 "that had it open wrote to it: remove the document and have it computed again",
                 layer)};
}

}  // namespace polykv::lib
