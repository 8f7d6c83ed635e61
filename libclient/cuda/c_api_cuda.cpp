// The C ABI of polykv/cuda.h.
#include "polykv/cuda.h"

#include "libclient/c_api.h"
#include "libclient/cuda/kernel_calls.h"
#include "libclient/cuda/reading.h"

using namespace polykv;
using namespace polykv::lib;

namespace {

template <size_t size>
void copy_text(const std::string& text, char (&out)[size]) {
  const size_t length = std::min(text.size(), size - 1);
  std::copy_n(text.begin(), length, out);
  out[length] = '\0';
}

Result<Queue> from_c(const polykv_cuda_queue* queue) {
  polykv_cuda_queue given{};
  POLYKV_RETURN_IF_ERROR(read_struct(queue, sizeof given, "polykv_cuda_queue", given));
  return Queue{given.device, given.stream};
}

}  // namespace

void polykv_cuda_queue_init(polykv_cuda_queue* queue) {
  if (init(queue) != nullptr) queue->device = -1;
}

polykv_status polykv_cuda_layer_decode(const polykv_lease* lease, uint32_t layer,
                                       const polykv_decode_options* options,
                                       const polykv_cuda_queue* queue) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "decode on a GPU"));
    POLYKV_ASSIGN_OR_RETURN(const DecodeRequest request, lib::from_c(options));
    POLYKV_ASSIGN_OR_RETURN(const Queue where, from_c(queue));
    return decode_on_device(*lease->lease, layer, request, where);
  });
}

polykv_status polykv_cuda_attend_workspace_bytes(const polykv_lease* lease, uint32_t layer,
                                                 const polykv_attend_options* options,
                                                 const polykv_cuda_queue* queue, uint64_t* out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "attend on a GPU"));
    POLYKV_RETURN_IF_ERROR(require(out, "attend on a GPU", "out"));
    POLYKV_ASSIGN_OR_RETURN(const AttendRequest request, lib::from_c(options));
    POLYKV_ASSIGN_OR_RETURN(const Queue where, from_c(queue));
    POLYKV_ASSIGN_OR_RETURN(*out,
                            attend_workspace_bytes(*lease->lease, layer, request, where.device));
    return Status::ok();
  });
}

polykv_status polykv_cuda_layer_attend(const polykv_lease* lease, uint32_t layer,
                                       const polykv_attend_options* options,
                                       const polykv_cuda_queue* queue, void* workspace,
                                       uint64_t workspace_bytes) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "attend on a GPU"));
    POLYKV_ASSIGN_OR_RETURN(const AttendRequest request, lib::from_c(options));
    POLYKV_ASSIGN_OR_RETURN(const Queue where, from_c(queue));
    return attend_on_device(*lease->lease, layer, request, {workspace, workspace_bytes}, where);
  });
}

void polykv_cuda_device_init(polykv_cuda_device* device) {
  if (init(device) != nullptr) device->index = -1;
}

void polykv_cuda_layer_view_init(polykv_cuda_layer_view* view) {
  if (init(view) != nullptr) view->device = -1;
}

polykv_status polykv_cuda_lease_device(const polykv_lease* lease, polykv_cuda_device* out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "find the document's GPU"));
    POLYKV_ASSIGN_OR_RETURN(const DeviceView view, device_view(*lease->lease, 0, -1));
    polykv_cuda_device device;
    polykv_cuda_device_init(&device);
    device.index = view.gpu.index;
    copy_text(view.gpu.info.name, device.name);
    copy_text(device::uuid_text(view.gpu.info.uuid), device.uuid);
    return write_struct(device, sizeof device, "polykv_cuda_device", out);
  });
}

polykv_status polykv_cuda_lease_layer_view(const polykv_lease* lease, uint32_t segment,
                                           uint32_t layer, int device,
                                           polykv_cuda_layer_view* out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "view a layer on a GPU"));
    POLYKV_ASSIGN_OR_RETURN(const LeasedSegment* const found,
                            lease->lease->find_segment(segment, layer));
    POLYKV_ASSIGN_OR_RETURN(const DeviceView place, device_view(*lease->lease, segment, device));
    const LayerRecord& record = found->view.layer_record(layer);
    polykv_cuda_layer_view view;
    polykv_cuda_layer_view_init(&view);
    view.first_token = found->first_token;
    view.token_count = found->token_count;
    view.geometry = to_c(found->view.layer(layer).geometry);
    view.profile = static_cast<polykv_profile>(record.profile);
    view.payload = place.data + (record.payload_offset - place.data_offset);
    view.payload_bytes = record.payload_bytes;
    view.device = place.gpu.index;
    return write_struct(view, sizeof view, "polykv_cuda_layer_view", out);
  });
}

polykv_status polykv_cuda_lease_staging_bytes(const polykv_lease* lease, uint64_t* out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "stage a document"));
    POLYKV_RETURN_IF_ERROR(require(out, "stage a document", "out"));
    POLYKV_ASSIGN_OR_RETURN(*out, staging_bytes(*lease->lease));
    return Status::ok();
  });
}

polykv_status polykv_cuda_lease_stage(polykv_lease* lease, int device, void* target,
                                      uint64_t target_bytes) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "stage a document"));
    POLYKV_RETURN_IF_ERROR(require(target, "stage a document", "target"));
    return stage(*lease->lease, device, target, target_bytes);
  });
}

polykv_status polykv_cuda_lease_release(polykv_lease* lease, void* const* streams,
                                        size_t stream_count) {
  if (lease == nullptr) return POLYKV_OK;
  const polykv_status waited = guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "release a lease"));
    if (stream_count != 0) POLYKV_RETURN_IF_ERROR(require(streams, "release a lease", "streams"));
    return wait_for_streams(*lease->lease, {streams, stream_count});
  });
  const polykv_status released = polykv_lease_release(lease);
  return waited != POLYKV_OK ? waited : released;
}

polykv_status polykv_cuda_segment_begin(polykv_publisher* publisher, uint64_t token_count,
                                        polykv_segment** out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(require(publisher, "begin a segment on a GPU", "publisher"));
    POLYKV_RETURN_IF_ERROR(require(out, "begin a segment on a GPU", "out"));
    POLYKV_RETURN_IF_ERROR(
        publisher->publisher->session().check_process("begin a segment on a GPU"));
    POLYKV_ASSIGN_OR_RETURN(auto segment, publisher->publisher->begin_segment(token_count, true));
    *out = new polykv_segment{std::move(segment)};
    return Status::ok();
  });
}

polykv_status polykv_cuda_encode_workspace_bytes(polykv_segment* segment, uint32_t layer,
                                                 uint64_t* out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(require(segment, "encode a layer on a GPU", "segment"));
    POLYKV_RETURN_IF_ERROR(require(out, "encode a layer on a GPU", "out"));
    POLYKV_ASSIGN_OR_RETURN(*out, segment->segment->device_workspace_bytes(layer));
    return Status::ok();
  });
}

polykv_status polykv_cuda_segment_encode_layer(polykv_segment* segment, uint32_t layer,
                                               const polykv_kv_source* source,
                                               const polykv_cuda_queue* queue, void* workspace,
                                               uint64_t workspace_bytes) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(require(segment, "encode a layer on a GPU", "segment"));
    POLYKV_RETURN_IF_ERROR(segment->segment->check_usable("encode a layer on a GPU"));
    POLYKV_ASSIGN_OR_RETURN(const KvSource kv, lib::from_c(source));
    POLYKV_ASSIGN_OR_RETURN(const Queue where, from_c(queue));
    EncodePlace place;
    POLYKV_ASSIGN_OR_RETURN(place.gpu, gpu_of_producer(segment->segment->gpu(), where.device));
    place.stream = where.stream;
    place.workspace = {workspace, workspace_bytes};
    return segment->segment->encode_layer_on_device(layer, kv, place);
  });
}
