// The C ABI: leases and publishers.
#include "libclient/c_api.h"

using namespace polykv;
using namespace polykv::lib;

namespace {

Status check_publisher(const polykv_publisher* publisher, const char* operation) {
  POLYKV_RETURN_IF_ERROR(require(publisher, operation, "publisher"));
  return publisher->publisher->session().check_process(operation);
}

}  // namespace

polykv_status polykv_lease_info(const polykv_lease* lease, polykv_document_info* out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "lease info"));
    polykv_document_info info = lease->view.info();
    info.segment_count = static_cast<uint32_t>(lease->lease->segments()->size());
    info.sealed_token_count = lease->lease->available_tokens();
    info.prefix_treatment = static_cast<uint32_t>(lease->lease->prefix_treatment());
    if (std::strcmp(info.state, "filling") == 0 && info.sealed_token_count == info.token_count)
      info.state = "sealed";
    return write_struct(info, sizeof *out, "polykv_document_info", out);
  });
}

polykv_status polykv_lease_tokens(const polykv_lease* lease, uint64_t first, uint64_t count,
                                  uint32_t* out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "read tokens"));
    if (count != 0) POLYKV_RETURN_IF_ERROR(require(out, "read tokens", "out"));
    return lease->lease->copy_tokens(first, count, out);
  });
}

polykv_status polykv_lease_layer_view(const polykv_lease* lease, uint32_t segment, uint32_t layer,
                                      polykv_layer_view* out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "view a layer"));
    POLYKV_ASSIGN_OR_RETURN(const LeasedSegment* const found,
                            lease->lease->find_segment(segment, layer));
    POLYKV_RETURN_IF_ERROR(found->fetch_layer(layer).with_context("view a layer"));
    const LayerView packed = found->view.layer(layer);
    const std::span<const uint8_t> payload = found->view.layer_payload(layer);
    polykv_layer_view view;
    polykv_layer_view_init(&view);
    view.first_token = found->first_token;
    view.token_count = found->token_count;
    view.geometry = to_c(packed.geometry);
    view.profile = static_cast<polykv_profile>(packed.profile);
    view.payload = payload.data();
    view.payload_bytes = payload.size();
    return write_struct(view, sizeof view, "polykv_layer_view", out);
  });
}

polykv_status polykv_lease_wait(polykv_lease* lease, uint64_t token_count, int64_t timeout_ms) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "wait for a document"));
    return lease->lease->wait_for(token_count, deadline_after_ms(timeout_ms));
  });
}

polykv_status polykv_layer_decode(const polykv_lease* lease, uint32_t layer,
                                  const polykv_decode_options* options) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "decode"));
    POLYKV_ASSIGN_OR_RETURN(const DecodeRequest request, from_c(options));
    return lease->lease->decode(layer, request);
  });
}

polykv_status polykv_lease_verify(const polykv_lease* lease) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_lease(lease, "verify"));
    return lease->lease->verify();
  });
}

polykv_status polykv_lease_release(polykv_lease* lease) {
  if (lease == nullptr) return POLYKV_OK;
  const polykv_status status = guarded([&] { return lease->lease->release(); });
  delete lease;
  return status;
}

polykv_status polykv_publisher_position(const polykv_publisher* publisher, uint64_t* out_next_token,
                                        uint64_t* out_token_count) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_publisher(publisher, "publisher position"));
    if (out_next_token != nullptr) *out_next_token = publisher->publisher->next_token();
    if (out_token_count != nullptr) *out_token_count = publisher->publisher->token_count();
    return Status::ok();
  });
}

polykv_status polykv_publisher_acquire_sealed(polykv_publisher* publisher,
                                              polykv_lease** out_lease) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_publisher(publisher, "acquire what is sealed"));
    POLYKV_RETURN_IF_ERROR(require(out_lease, "acquire what is sealed", "out_lease"));
    POLYKV_ASSIGN_OR_RETURN(auto lease, publisher->publisher->acquire_sealed());
    *out_lease = new polykv_lease(std::move(lease));
    return Status::ok();
  });
}

polykv_status polykv_segment_begin(polykv_publisher* publisher, uint64_t token_count,
                                   polykv_segment** out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_publisher(publisher, "begin a segment"));
    POLYKV_RETURN_IF_ERROR(require(out, "begin a segment", "out"));
    POLYKV_ASSIGN_OR_RETURN(auto segment, publisher->publisher->begin_segment(token_count));
    *out = new polykv_segment{std::move(segment)};
    return Status::ok();
  });
}

polykv_status polykv_publisher_examine_layer(polykv_publisher* publisher, uint64_t token_count,
                                             uint32_t layer, const polykv_kv_source* source,
                                             const polykv_layer_queries* queries) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_publisher(publisher, "examine a layer"));
    POLYKV_ASSIGN_OR_RETURN(const KvSource kv, from_c(source));
    polykv_layer_queries given{};
    POLYKV_RETURN_IF_ERROR(read_struct(queries, sizeof given, "polykv_layer_queries", given));
    LayerQueries judges;
    POLYKV_ASSIGN_OR_RETURN(judges.dtype, dtype_from_c(given.dtype));
    judges.q = given.q;
    judges.strides = from_c(given.strides);
    judges.head_count = given.head_count;
    judges.row_count = given.query_count;
    judges.scale = given.scale;
    judges.soft_cap = given.soft_cap;
    return publisher->publisher->examine_layer(token_count, layer, kv, judges);
  });
}

polykv_status polykv_segment_encode_layer(polykv_segment* segment, uint32_t layer,
                                          const polykv_kv_source* source) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(require(segment, "encode a layer", "segment"));
    POLYKV_ASSIGN_OR_RETURN(const KvSource request, from_c(source));
    return segment->segment->encode_layer(layer, request);
  });
}

polykv_status polykv_segment_commit(polykv_segment* segment) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(require(segment, "commit a segment", "segment"));
    const std::unique_ptr<polykv_segment> owned(segment);
    return owned->segment->commit();
  });
}

void polykv_segment_abort(polykv_segment* segment) {
  delete segment;
}

polykv_status polykv_publisher_progress(polykv_publisher* publisher, uint64_t tokens_done) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_publisher(publisher, "report progress"));
    return publisher->publisher->progress(tokens_done);
  });
}

polykv_status polykv_publisher_finish(polykv_publisher* publisher, polykv_lease** out_lease) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(require(publisher, "finish publishing", "publisher"));
    const std::unique_ptr<polykv_publisher> owned(publisher);
    if (out_lease == nullptr) return owned->publisher->finish();
    POLYKV_ASSIGN_OR_RETURN(auto lease, owned->publisher->finish_with_lease());
    *out_lease = new polykv_lease(std::move(lease));
    return Status::ok();
  });
}

void polykv_publisher_abort(polykv_publisher* publisher) {
  if (publisher == nullptr) return;
  // An open segment may keep the publisher alive: the ticket is given up now, not with it.
  static_cast<void>(guarded([&] {
    publisher->publisher->abort();
    return Status::ok();
  }));
  delete publisher;
}
