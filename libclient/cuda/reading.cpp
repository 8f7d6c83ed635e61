#include "libclient/cuda/reading.h"

#include <cinttypes>

namespace polykv::lib {

namespace {

/// Of each staged segment, so that whatever CUDA aligns stays aligned.
constexpr uint64_t kStagingAlignment = 256;

uint64_t staged_bytes(const LeasedSegment& segment) {
  const SegmentHeader& header = segment.view.header();
  const uint64_t bytes = header.total_bytes - header.data_offset;
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

Status check_stageable(const Lease& lease) {
  const auto segments = lease.segments();
  if (!segments->empty() && segments->front()->device) {
    return {POLYKV_ERR_UNSUPPORTED,
            "stage a document: it is in device memory; read it there "
            "(polykv_cuda_lease_layer_view)"};
  }
  if (lease.available_tokens() < lease.document().token_count) {
    return {POLYKV_ERR_BUSY, format("stage a document: %" PRIu64 " of %" PRIu64
                                    " tokens are there; wait for the others (polykv_lease_wait)",
                                    lease.available_tokens(), lease.document().token_count)};
  }
  return Status::ok();
}

Result<Gpu> gpu_of_index(device::Runtime& runtime, int index) {
  POLYKV_ASSIGN_OR_RETURN(const std::vector<device::DeviceInfo> devices, runtime.devices());
  if (index >= 0 && static_cast<size_t>(index) < devices.size())
    return Gpu{&runtime, index, devices[static_cast<size_t>(index)]};
  return {POLYKV_ERR_WRONG_DEVICE,
          format("choose GPU %d: this process sees %zu; see CUDA_VISIBLE_DEVICES", index,
                 devices.size())};
}

/// That kernels of one GPU can read the memory of another.
Status connect_peers(const Gpu& reader, const Gpu& owner) {
  device::Runtime& runtime = *owner.runtime;
  POLYKV_RETURN_IF_ERROR(runtime.use_device(reader.index));
  POLYKV_ASSIGN_OR_RETURN(const bool can, runtime.can_access_peer(owner.index));
  if (!can) {
    return {POLYKV_ERR_WRONG_DEVICE,
            "read on " + device::uuid_text(reader.info.uuid) + " (" + reader.info.name +
                ") what is on " + device::uuid_text(owner.info.uuid) + " (" + owner.info.name +
                "): the two have no peer access; read on the document's GPU"};
  }
  return runtime.enable_peer_access(owner.index);
}

}  // namespace

Result<DeviceView> device_view(const Lease& lease, uint32_t segment, int device) {
  POLYKV_ASSIGN_OR_RETURN(const LeasedSegment* const found, lease.find_segment(segment, 0));
  DeviceView view;
  view.data_offset = found->view.header().data_offset;
  if (found->device) {
    POLYKV_ASSIGN_OR_RETURN(const DeviceSegment::View opened, found->device->open());
    view.data = static_cast<const uint8_t*>(opened.data);
    view.gpu = opened.gpu;
  } else {
    const Staging staging = lease.staging();
    if (segment >= staging.segments.size()) {
      return {POLYKV_ERR_UNSUPPORTED,
              "read on a GPU: the document is in host memory; copy it to device memory first "
              "(polykv_cuda_lease_stage), or read it with polykv_layer_decode"};
    }
    view.data = static_cast<const uint8_t*>(staging.segments[segment]);
    view.gpu = staging.gpu;
    POLYKV_RETURN_IF_ERROR(view.gpu.runtime->use_device(view.gpu.index));
  }
  if (device < 0 || device == view.gpu.index) return view;
  POLYKV_ASSIGN_OR_RETURN(const Gpu reader, gpu_of_index(*view.gpu.runtime, device));
  POLYKV_RETURN_IF_ERROR(connect_peers(reader, view.gpu));
  return view;
}

Result<uint64_t> staging_bytes(const Lease& lease) {
  POLYKV_RETURN_IF_ERROR(check_stageable(lease));
  uint64_t bytes = 0;
  for (const auto& segment : *lease.segments()) bytes += staged_bytes(*segment);
  return bytes;
}

Status stage(Lease& lease, int device, void* target, uint64_t target_bytes) {
  POLYKV_ASSIGN_OR_RETURN(const uint64_t needed_bytes, staging_bytes(lease));
  if (target_bytes < needed_bytes || reinterpret_cast<uintptr_t>(target) % kStagingAlignment != 0) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("stage a document: %" PRIu64 " bytes of device memory are needed, aligned to "
                   "%" PRIu64 ", and %" PRIu64 " given",
                   needed_bytes, kStagingAlignment, target_bytes)};
  }
  // The driver is this process's own affair here: polykvd has nothing on the GPU.
  POLYKV_ASSIGN_OR_RETURN(device::Runtime* const runtime, client_runtime(0));
  Staging staging;
  POLYKV_ASSIGN_OR_RETURN(staging.gpu, gpu_of_index(*runtime, device));
  POLYKV_RETURN_IF_ERROR(runtime->use_device(device));
  auto* next = static_cast<uint8_t*>(target);
  for (const auto& segment : *lease.segments()) {
    const SegmentHeader& header = segment->view.header();
    const auto payload = segment->view.bytes().subspan(header.data_offset);
    POLYKV_RETURN_IF_ERROR(runtime->copy_to_device(next, payload.data(), payload.size()));
    staging.segments.push_back(next);
    next += staged_bytes(*segment);
  }
  lease.set_staging(std::move(staging));
  return Status::ok();
}

Result<Gpu> gpu_of_producer(const Gpu* own, int device) {
  if (own == nullptr) {
    POLYKV_ASSIGN_OR_RETURN(device::Runtime* const runtime, client_runtime(0));
    return gpu_of_index(*runtime, device);
  }
  if (device < 0 || device == own->index) return *own;
  return {POLYKV_ERR_WRONG_DEVICE,
          format("encode on GPU %d: the segment is on %d, %s; let K and V be there", device,
                 own->index, device::uuid_text(own->info.uuid).c_str())};
}

Status wait_for_streams(const Lease& lease, std::span<void* const> streams) {
  if (streams.empty()) return Status::ok();
  POLYKV_ASSIGN_OR_RETURN(const DeviceView view, device_view(lease, 0, -1));
  for (void* const stream : streams)
    POLYKV_RETURN_IF_ERROR(view.gpu.runtime->synchronize_stream(stream));
  return Status::ok();
}

}  // namespace polykv::lib
