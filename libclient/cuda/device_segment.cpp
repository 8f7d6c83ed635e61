#include "libclient/cuda/device_segment.h"

#include "libclient/cuda/checksums.h"

namespace polykv::lib {

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

Status DeviceSegment::verify(const SegmentView& view) {
  const std::lock_guard lock(mutex_);
  POLYKV_RETURN_IF_ERROR(open_locked());
  const auto* const data = static_cast<const uint8_t*>(opened_->pointer());
  std::vector<cuda::ChecksumRange> payloads;
  for (uint32_t layer = 0; layer < view.layer_count(); ++layer) {
    const LayerRecord& record = view.layer_record(layer);
    payloads.push_back({data + (record.payload_offset - data_offset_), record.payload_bytes});
  }
  POLYKV_ASSIGN_OR_RETURN(const std::vector<uint64_t> sums,
                          device_checksums(*opened_->gpu().runtime, payloads));
  POLYKV_RETURN_IF_ERROR(session_->check_connected("use device memory"));
  for (uint32_t layer = 0; layer < view.layer_count(); ++layer) {
    if (sums[layer] == view.layer_record(layer).payload_checksum) continue;
    return {POLYKV_ERR_CORRUPT,
            format("layer %u: its payload in device memory does not match its checksum; a process "
                   "that had it open wrote to it: remove the document and have it computed again",
                   layer)};
  }
  return Status::ok();
}

}  // namespace polykv::lib
