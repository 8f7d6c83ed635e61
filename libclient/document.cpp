#include "libclient/document.h"

#include <algorithm>

namespace polykv::lib {

Result<DocumentRecord> from_wire(const wire::DocumentInfo* info) {
  const auto bad = [](const std::string& what) {
    return Status(POLYKV_ERR_PROTOCOL, "read a document's description: " + what);
  };
  if (info == nullptr) return bad("it is missing");
  if (info->digest() == nullptr || info->model() == nullptr) return bad("digest or model missing");
  DocumentRecord record;
  if (info->names() != nullptr) {
    for (const auto* name : *info->names()) record.names.emplace_back(text_or_empty(name));
  }
  record.digest = polykv::from_wire(*info->digest());
  Result<ModelIdentity> identity = polykv::from_wire(*info->model());
  if (!identity.is_ok()) return bad(identity.status().message());
  record.identity = std::move(identity).value();
  record.profile = static_cast<Profile>(info->profile());
  record.token_count = info->token_count();
  if (record.token_count > kMaxTokens) return bad("more tokens than any document has");
  record.segment_count = info->segment_count();
  record.stored_bytes = info->stored_bytes();
  record.bf16_bytes = info->bf16_bytes();
  record.lease_count = info->lease_count();
  record.state = text_or_empty(info->state());
  record.created_unix_ms = info->created_unix_ms();
  record.is_public = info->is_public();
  record.sealed_token_count = info->sealed_token_count();
  if (record.sealed_token_count > record.token_count)
    return bad("more tokens sealed than there are");
  record.shared_bytes = info->shared_bytes();
  record.prefix_treatment = static_cast<PrefixTreatment>(info->prefix_treatment());
  if (record.prefix_treatment > PrefixTreatment::recomputed) return bad("its prefix is unknown");
  record.backing = info->backing() == nullptr ? "memfd" : text_or_empty(info->backing());
  if (info->layers() != nullptr) {
    for (const wire::LayerQuality* layer : *info->layers())
      record.layers.push_back({layer->profiles(), layer->query_count(), layer->relative_error()});
  }
  if (info->layers() == nullptr) record.layers.resize(record.identity.layers.size());
  if (record.layers.size() != record.identity.layers.size())
    return bad("its layers are not the model's");
  return record;
}

Status list_documents(Session& session, const std::function<bool(const DocumentRecord&)>& visit) {
  uint64_t cursor = 0;
  do {
    flatbuffers::FlatBufferBuilder builder;
    POLYKV_ASSIGN_OR_RETURN(const Message reply, session.call<wire::Listing>(
                                                     builder, wire::CreateList(builder, cursor)));
    const auto* listing = reply.as<wire::Listing>();
    if (listing->documents() != nullptr) {
      for (const wire::DocumentInfo* info : *listing->documents()) {
        POLYKV_ASSIGN_OR_RETURN(const DocumentRecord record, from_wire(info));
        if (!visit(record)) return Status::ok();
      }
    }
    const uint64_t next = listing->next_cursor();
    // Cursors grow: otherwise a defect would list for ever.
    if (next != 0 && next <= cursor) {
      return {POLYKV_ERR_PROTOCOL, "list documents: polykvd's cursor went backwards"};
    }
    cursor = next;
  } while (cursor != 0);
  return Status::ok();
}

Status remove_document(Session& session, const std::string& name, const Digest* digest) {
  flatbuffers::FlatBufferBuilder builder;
  const auto text = name.empty() ? 0 : builder.CreateString(name);
  wire::Digest wire_digest;
  if (digest != nullptr) wire_digest = to_wire(*digest);
  const auto body = wire::CreateRemove(builder, text, digest == nullptr ? nullptr : &wire_digest);
  return session.call<wire::Done>(builder, body).status();
}

namespace {
template <size_t size>
void copy_text(std::string_view text, char (&out)[size]) {
  const size_t length = std::min(text.size(), size - 1);
  std::copy_n(text.begin(), length, out);
  out[length] = '\0';
}
}  // namespace

Status read_daemon_status(Session& session, polykv_daemon_status& out) {
  flatbuffers::FlatBufferBuilder builder;
  POLYKV_ASSIGN_OR_RETURN(const Message reply,
                          session.call<wire::StatusReply>(builder, wire::CreateGetStatus(builder)));
  const auto* status = reply.as<wire::StatusReply>();
  out.epoch = status->epoch();
  copy_text(text_or_empty(status->version()), out.version);
  out.pid = status->pid();
  out.uptime_ms = status->uptime_ms();
  out.budget_bytes = status->budget_bytes();
  out.stored_bytes = status->stored_bytes();
  out.retiring_bytes = status->retiring_bytes();
  out.document_count = status->document_count();
  out.segment_count = status->segment_count();
  out.lease_count = status->lease_count();
  out.session_count = status->session_count();
  out.worker_count = status->worker_count();
  out.tokens_prefilled_total = status->tokens_prefilled_total();
  out.tokens_committed_total = status->tokens_committed_total();
  out.evicted_documents_total = status->evicted_documents_total();
  out.fingerprint_cache_hits_total = status->fingerprint_cache_hits_total();
  out.fingerprint_cache_misses_total = status->fingerprint_cache_misses_total();
  copy_text(status->backing() == nullptr ? "memfd" : text_or_empty(status->backing()), out.backing);
  copy_text(text_or_empty(status->backing_note()), out.backing_note);
  copy_text(text_or_empty(status->device_name()), out.device_name);
  copy_text(text_or_empty(status->device_uuid()), out.device_uuid);
  out.device_total_bytes = status->device_total_bytes();
  out.device_free_bytes = status->device_free_bytes();
  out.device_reserve_bytes = status->device_reserve_bytes();
  out.device_driver = status->device_driver();
  out.device_runtime = status->device_runtime();
  return Status::ok();
}

}  // namespace polykv::lib
