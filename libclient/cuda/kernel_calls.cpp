#include "libclient/cuda/kernel_calls.h"

#include "device/library.h"
#include "libclient/cuda/on_device.h"
#include "libclient/cuda/reading.h"

namespace polykv::lib {

namespace {

/// Makes the GPU current for this thread.
Result<LayerView> device_layer(const Lease& lease, uint32_t index, const LeasedSegment& segment,
                               uint32_t layer, int device) {
  POLYKV_ASSIGN_OR_RETURN(const DeviceView place, device_view(lease, index, device));
  return on_device(segment.view.layer(layer), segment.view.bytes().data() + place.data_offset,
                   place.data);
}

/// An AttendCall and what it points to; moving it leaves the runs where they are.
struct PlannedCall {
  std::vector<cuda::AttendRun> runs;
  cuda::AttendCall call;
};

cuda::QueryStrides query_strides(const Strides& given, uint32_t head_count, uint32_t head_dim) {
  const Strides strides = dense_unless_given(given, head_count, head_dim);
  return {strides.token, strides.head, strides.dim};
}

Result<PlannedCall> plan_call(const Lease& lease, uint32_t layer, const AttendRequest& request,
                              int device) {
  POLYKV_RETURN_IF_ERROR(check_attend_request(lease, layer, request));
  const LayerGeometry& geometry = lease.document().identity.layers[layer];
  PlannedCall planned;
  const auto segments = lease.segments();
  const uint64_t last = request.first_token + request.token_count;
  for (uint32_t i = 0; i < segments->size(); ++i) {
    const LeasedSegment& segment = *(*segments)[i];
    auto [begin, end] = segment.tokens_of(request.first_token, last);
    // A call needs a segment even if it is for no token.
    if (begin >= end && !(request.token_count == 0 && i == 0)) continue;
    if (begin >= end) begin = end = segment.first_token;
    POLYKV_ASSIGN_OR_RETURN(const LayerView view, device_layer(lease, i, segment, layer, device));
    planned.runs.push_back({view, segment.first_token, begin - segment.first_token, end - begin});
  }
  cuda::AttendCall& call = planned.call;
  call.query_count = request.query_count;
  call.head_count = request.head_count;
  call.query_dtype = request.query_dtype;
  call.q = request.q;
  call.q_strides = query_strides(request.q_strides, request.head_count, geometry.k_head_dim);
  call.scale = attend_scale(request, geometry);
  call.soft_cap = request.soft_cap;
  call.query_first_tokens = request.first_tokens;
  call.output_dtype = request.output_dtype;
  call.output = request.output;
  call.output_strides =
      query_strides(request.output_strides, request.head_count, geometry.v_head_dim);
  call.log_sum_exp = request.log_sum_exp;
  call.runs = planned.runs;
  POLYKV_RETURN_IF_ERROR(cuda::check_attend(call));
  return planned;
}

}  // namespace

Result<cuda::Kernels*> client_kernels() {
  POLYKV_ASSIGN_OR_RETURN(void* const factory,
                          device::find_function(client_library(), cuda::kKernelsFactoryName));
  cuda::Kernels* const kernels =
      reinterpret_cast<cuda::KernelsFactory>(factory)(cuda::kKernelsVersion);
  if (kernels != nullptr) return kernels;
  return {POLYKV_ERR_VERSION,
          format("use the kernels of '%s': they are of another version than this library's %u; "
                 "install both from one package",
                 client_library().c_str(), cuda::kKernelsVersion)};
}

Status decode_on_device(const Lease& lease, uint32_t layer, const DecodeRequest& request,
                        const Queue& queue) {
  POLYKV_ASSIGN_OR_RETURN(const std::vector<SegmentTarget> targets,
                          lease.decode_targets(layer, request));
  POLYKV_ASSIGN_OR_RETURN(cuda::Kernels* const kernels, client_kernels());
  for (const SegmentTarget& part : targets) {
    POLYKV_ASSIGN_OR_RETURN(const LayerView view,
                            device_layer(lease, part.index, *part.segment, layer, queue.device));
    POLYKV_RETURN_IF_ERROR(kernels->decode(view, part.target, queue.stream));
  }
  return Status::ok();
}

Result<uint64_t> attend_workspace_bytes(const Lease& lease, uint32_t layer,
                                        const AttendRequest& request, int device) {
  POLYKV_ASSIGN_OR_RETURN(cuda::Kernels* const kernels, client_kernels());
  POLYKV_ASSIGN_OR_RETURN(const PlannedCall planned, plan_call(lease, layer, request, device));
  return kernels->attend_workspace_bytes(planned.call);
}

Status attend_on_device(const Lease& lease, uint32_t layer, const AttendRequest& request,
                        const cuda::Workspace& workspace, const Queue& queue) {
  POLYKV_ASSIGN_OR_RETURN(cuda::Kernels* const kernels, client_kernels());
  POLYKV_ASSIGN_OR_RETURN(const PlannedCall planned,
                          plan_call(lease, layer, request, queue.device));
  return kernels->attend(planned.call, workspace, queue.stream);
}

}  // namespace polykv::lib
