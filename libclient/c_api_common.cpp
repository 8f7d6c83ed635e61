// The C ABI: versions, texts, and what its other files share.
#include "libclient/c_api.h"

#include <cstring>

namespace polykv::lib {

namespace {
std::string& last_error() {
  thread_local std::string message;
  return message;
}
}  // namespace

polykv_status report(const Status& status) noexcept {
  if (status.is_ok()) return POLYKV_OK;
  try {
    last_error() = status.message().empty() ? status_text(status.code()) : status.message();
  } catch (...) {
    last_error().clear();  // no memory for a text: the code has to do
  }
  return status.code();
}

Status require(const void* pointer, const char* operation, const char* argument) {
  if (pointer != nullptr) return Status::ok();
  return {POLYKV_ERR_INVALID_ARGUMENT, format("%s: %s is NULL", operation, argument)};
}

Result<Dtype> dtype_from_c(const polykv_dtype& dtype) {
  const uint32_t value = number_of(dtype);
  if (!dtype_is_valid(value)) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("dtype %u is unknown; POLYKV_F32, POLYKV_F16 and POLYKV_BF16 exist", value)};
  }
  return static_cast<Dtype>(value);
}

Result<ModelIdentity> from_c(const polykv_model& given) {
  polykv_model model{};
  POLYKV_RETURN_IF_ERROR(read_struct(&given, sizeof given, "polykv_model", model));
  ModelIdentity identity;
  identity.name = text_of(model.name);
  std::copy_n(model.fingerprint, identity.fingerprint.size(), identity.fingerprint.begin());
  POLYKV_ASSIGN_OR_RETURN(identity.source_dtype, dtype_from_c(model.source_dtype));
  identity.rope = {static_cast<RopeKind>(number_of(model.rope_kind)),
                   static_cast<RopeScaling>(number_of(model.rope_scaling)),
                   model.rotary_dim,
                   model.rope_theta,
                   model.rope_scaling_factor,
                   model.original_context};
  if (model.layer_count > kMaxLayers || (model.layer_count != 0 && model.layers == nullptr)) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("polykv_model: %u layers; 1 to %u and their geometry are needed",
                   model.layer_count, kMaxLayers)};
  }
  for (uint32_t i = 0; i < model.layer_count; ++i) {
    const polykv_layer_geometry& layer = model.layers[i];
    identity.layers.push_back(
        {layer.kv_head_count, layer.k_head_dim, layer.v_head_dim, layer.sliding_window});
  }
  POLYKV_RETURN_IF_ERROR(check_identity(identity));
  return identity;
}

Result<DecodeRequest> from_c(const polykv_decode_options* options) {
  polykv_decode_options given{};
  POLYKV_RETURN_IF_ERROR(read_struct(options, sizeof given, "polykv_decode_options", given));
  DecodeRequest request;
  request.first_token = given.first_token;
  request.token_count = given.token_count;
  POLYKV_ASSIGN_OR_RETURN(request.dtype, dtype_from_c(given.dtype));
  request.k = given.k;
  request.v = given.v;
  request.k_strides = from_c(given.k_strides);
  request.v_strides = from_c(given.v_strides);
  return request;
}

Result<AttendRequest> from_c(const polykv_attend_options* options) {
  polykv_attend_options given{};
  POLYKV_RETURN_IF_ERROR(read_struct(options, sizeof given, "polykv_attend_options", given));
  AttendRequest request;
  request.first_token = given.first_token;
  request.token_count = given.token_count;
  request.query_count = given.query_count;
  request.head_count = given.head_count;
  POLYKV_ASSIGN_OR_RETURN(request.query_dtype, dtype_from_c(given.query_dtype));
  request.q = given.q;
  request.q_strides = from_c(given.q_strides);
  request.scale = given.scale;
  request.soft_cap = given.soft_cap;
  request.first_tokens = given.query_first_tokens;
  POLYKV_ASSIGN_OR_RETURN(request.output_dtype, dtype_from_c(given.output_dtype));
  request.output = given.output;
  request.output_strides = from_c(given.output_strides);
  request.log_sum_exp = given.log_sum_exp;
  request.thread_count = given.thread_count;
  return request;
}

Result<KvSource> from_c(const polykv_kv_source* source) {
  polykv_kv_source given{};
  POLYKV_RETURN_IF_ERROR(read_struct(source, sizeof given, "polykv_kv_source", given));
  KvSource result;
  POLYKV_ASSIGN_OR_RETURN(result.dtype, dtype_from_c(given.dtype));
  result.k = given.k;
  result.v = given.v;
  result.k_strides = from_c(given.k_strides);
  result.v_strides = from_c(given.v_strides);
  return result;
}

DocumentView::DocumentView(const DocumentRecord& record) {
  for (const std::string& name : record.names) names_.push_back(name.c_str());
  const ModelIdentity& identity = record.identity;
  for (const LayerGeometry& layer : identity.layers) layers_.push_back(to_c(layer));
  for (const LayerQuality& layer : record.layers)
    qualities_.push_back({layer.profiles, layer.query_count, layer.relative_error});
  polykv_model_init(&model_);
  model_.name = identity.name.c_str();
  std::copy(identity.fingerprint.begin(), identity.fingerprint.end(), model_.fingerprint);
  model_.source_dtype = static_cast<polykv_dtype>(identity.source_dtype);
  model_.rope_kind = static_cast<polykv_rope_kind>(identity.rope.kind);
  model_.rope_scaling = static_cast<polykv_rope_scaling>(identity.rope.scaling);
  model_.rotary_dim = identity.rope.rotary_dim;
  model_.original_context = identity.rope.original_context;
  model_.rope_theta = identity.rope.theta;
  model_.rope_scaling_factor = identity.rope.scaling_factor;
  model_.layer_count = static_cast<uint32_t>(layers_.size());
  model_.layers = layers_.data();

  polykv_document_info_init(&info_);
  info_.names = names_.data();
  info_.name_count = names_.size();
  std::copy(record.digest.begin(), record.digest.end(), info_.digest);
  info_.model = &model_;
  info_.profile = static_cast<polykv_profile>(record.profile);
  info_.token_count = record.token_count;
  info_.segment_count = record.segment_count;
  info_.stored_bytes = record.stored_bytes;
  info_.bf16_bytes = record.bf16_bytes;
  info_.lease_count = record.lease_count;
  info_.state = record.state.c_str();
  info_.created_unix_ms = record.created_unix_ms;
  info_.is_public = record.is_public ? 1 : 0;
  info_.sealed_token_count = record.sealed_token_count;
  info_.shared_bytes = record.shared_bytes;
  info_.prefix_treatment = static_cast<uint32_t>(record.prefix_treatment);
  info_.layers = qualities_.data();
  info_.backing = record.backing.c_str();
}

}  // namespace polykv::lib

using namespace polykv;
using namespace polykv::lib;

uint32_t polykv_version(void) {
  return POLYKV_VERSION;
}
const char* polykv_version_text(void) {
  return POLYKV_VERSION_TEXT;
}
const char* polykv_status_text(polykv_status status) {
  return status_text(status);
}
const char* polykv_status_name(polykv_status status) {
  return status_name(status);
}
const char* polykv_last_error(void) {
  return last_error().c_str();
}

const char* polykv_profile_name(polykv_profile profile) {
  return profile_name(profile_from_c(profile));
}

polykv_status polykv_profile_from_name(const char* name, polykv_profile* out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(require(name, "polykv_profile_from_name", "name"));
    POLYKV_RETURN_IF_ERROR(require(out, "polykv_profile_from_name", "out"));
    const std::optional<Profile> profile = profile_from_name(name);
    if (!profile) {
      return {POLYKV_ERR_INVALID_ARGUMENT,
              format("codec profile '%s' is unknown; there are k5v4, k6v5, k8v8, k8v3, k4v3, auto, "
                     "exact and paper-k8v3",
                     name)};
    }
    *out = static_cast<polykv_profile>(*profile);
    return Status::ok();
  });
}

void polykv_model_init(polykv_model* model) {
  if (init(model) == nullptr) return;
  model->source_dtype = POLYKV_F32;
  model->rope_scaling_factor = 1;
}

void polykv_connect_options_init(polykv_connect_options* options) {
  if (init(options) != nullptr) options->timeout_ms = ConnectOptions().timeout_ms;
}

void polykv_acquire_options_init(polykv_acquire_options* options) {
  if (init(options) == nullptr) return;
  options->model_fd = -1;
  options->timeout_ms = AcquireRequest().timeout_ms;
}

void polykv_decode_options_init(polykv_decode_options* options) {
  if (init(options) != nullptr) options->dtype = POLYKV_F32;
}

void polykv_kv_source_init(polykv_kv_source* source) {
  if (init(source) != nullptr) source->dtype = POLYKV_F32;
}

void polykv_layer_queries_init(polykv_layer_queries* queries) {
  if (init(queries) != nullptr) queries->dtype = POLYKV_F32;
}

void polykv_ingest_options_init(polykv_ingest_options* options) {
  if (init(options) == nullptr) return;
  options->model_fd = -1;
  options->text_fd = -1;
  options->before_fd = -1;
  options->profile = POLYKV_PROFILE_K5V4;
  options->timeout_ms = -1;
}

void polykv_document_info_init(polykv_document_info* info) {
  init(info);
}
void polykv_layer_view_init(polykv_layer_view* view) {
  init(view);
}
void polykv_daemon_status_init(polykv_daemon_status* status) {
  init(status);
}
