// The C ABI: sessions, acquire, ingest and the catalog.
#include "libclient/c_api.h"

using namespace polykv;
using namespace polykv::lib;

namespace {

Status check_session(const polykv_session* session, const char* operation) {
  POLYKV_RETURN_IF_ERROR(require(session, operation, "session"));
  return session->session->check_process(operation);
}

Status check_tokens(const uint32_t* tokens, size_t count, const char* operation) {
  if (tokens != nullptr || count == 0) return Status::ok();
  return {POLYKV_ERR_INVALID_ARGUMENT, format("%s: tokens is NULL", operation)};
}

Status exactly_one(const char* operation, const char* choices, int given) {
  if (given == 1) return Status::ok();
  return {POLYKV_ERR_INVALID_ARGUMENT,
          format("%s: give exactly one of %s; %d were given", operation, choices, given)};
}

Result<AcquireRequest> to_request(const polykv_acquire_options& options, ModelIdentity& model) {
  constexpr const char* kOperation = "acquire";
  AcquireRequest request;
  request.name = text_of(options.name);
  if (options.digest != nullptr) {
    request.digest.emplace();
    std::copy_n(options.digest, request.digest->size(), request.digest->begin());
  }
  if (options.model != nullptr) {
    POLYKV_ASSIGN_OR_RETURN(model, from_c(*options.model));
    request.model = &model;
  }
  request.model_name = text_of(options.model_name);
  request.model_fd = options.model_fd < 0 ? -1 : options.model_fd;
  POLYKV_RETURN_IF_ERROR(exactly_one(
      kOperation, "name, digest, model, model_name and model_fd",
      (options.name != nullptr) + (options.digest != nullptr) + (options.model != nullptr) +
          (options.model_name != nullptr) + (options.model_fd >= 0)));
  if (options.name != nullptr) POLYKV_RETURN_IF_ERROR(check_name(request.name));
  POLYKV_RETURN_IF_ERROR(check_tokens(options.tokens, options.token_count, kOperation));
  request.tokens = {options.tokens, options.token_count};
  const bool by_tokens = options.name == nullptr && options.digest == nullptr;
  if (by_tokens && request.tokens.empty()) {
    return {POLYKV_ERR_EMPTY_DOCUMENT, "acquire: the document has no tokens; a model needs some"};
  }
  if (!by_tokens && !request.tokens.empty()) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "acquire: tokens go with a model; a name or digest says enough"};
  }
  request.profile = profile_from_c(options.profile);
  request.may_produce = (options.flags & POLYKV_ACQUIRE_MAY_PRODUCE) != 0;
  request.wait = (options.flags & POLYKV_ACQUIRE_WAIT) != 0;
  request.replace_name = (options.flags & POLYKV_ACQUIRE_REPLACE_NAME) != 0;
  request.stream = (options.flags & POLYKV_ACQUIRE_STREAM) != 0;
  if (options.extends != nullptr) {
    if (!by_tokens) return {POLYKV_ERR_INVALID_ARGUMENT, "acquire: extends goes with tokens"};
    request.extends.emplace();
    std::copy_n(options.extends, request.extends->size(), request.extends->begin());
  }
  if (request.may_produce && (request.profile == Profile::any || !by_tokens)) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "acquire: a producer names a model, the tokens and a codec profile"};
  }
  request.timeout_ms = options.timeout_ms;
  request.publish_name = text_of(options.publish_name);
  if (options.publish_name != nullptr) POLYKV_RETURN_IF_ERROR(check_name(request.publish_name));
  return request;
}

Result<IngestRequest> to_request(const polykv_ingest_options& options) {
  constexpr const char* kOperation = "ingest";
  POLYKV_RETURN_IF_ERROR(exactly_one(kOperation, "model_name and model_fd",
                                     (options.model_name != nullptr) + (options.model_fd >= 0)));
  POLYKV_RETURN_IF_ERROR(exactly_one(kOperation, "text_fd and tokens",
                                     (options.text_fd >= 0) + (options.tokens != nullptr)));
  IngestRequest request;
  request.name = text_of(options.name);
  if (options.name != nullptr) POLYKV_RETURN_IF_ERROR(check_name(request.name));
  request.model_name = text_of(options.model_name);
  request.model_fd = options.model_fd < 0 ? -1 : options.model_fd;
  request.text_fd = options.text_fd < 0 ? -1 : options.text_fd;
  request.tokens = {options.tokens, options.tokens == nullptr ? 0 : options.token_count};
  if (options.tokens != nullptr && options.token_count == 0) {
    return {POLYKV_ERR_EMPTY_DOCUMENT, "ingest: the document has no tokens; give some"};
  }
  request.before_fd = options.before_fd < 0 ? -1 : options.before_fd;
  request.profile = profile_from_c(options.profile);
  request.add_bos = (options.flags & POLYKV_INGEST_ADD_BOS) != 0;
  request.parse_special = (options.flags & POLYKV_INGEST_PARSE_SPECIAL) != 0;
  request.chat_head = (options.flags & POLYKV_INGEST_CHAT_HEAD) != 0;
  request.replace_name = (options.flags & POLYKV_INGEST_REPLACE_NAME) != 0;
  request.share_public = (options.flags & POLYKV_INGEST_SHARE_PUBLIC) != 0;
  request.recompute_prefix = (options.flags & POLYKV_INGEST_RECOMPUTE_PREFIX) != 0;
  request.extend_name = text_of(options.extend_name);
  if (options.extend_name != nullptr) POLYKV_RETURN_IF_ERROR(check_name(request.extend_name));
  if (options.extend_digest != nullptr) {
    request.extend_digest.emplace();
    std::copy_n(options.extend_digest, request.extend_digest->size(),
                request.extend_digest->begin());
  }
  request.timeout_ms = options.timeout_ms;
  if (options.on_progress != nullptr) {
    request.on_progress = [callback = options.on_progress,
                           user = options.user](const polykv_ingest_progress& progress) {
      return callback(user, &progress) == 0;
    };
  }
  return request;
}

}  // namespace

polykv_status polykv_session_connect(const polykv_connect_options* options, polykv_session** out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(require(out, "connect", "out"));
    polykv_connect_options given{};
    polykv_connect_options_init(&given);
    if (options != nullptr) {
      POLYKV_RETURN_IF_ERROR(read_struct(options, sizeof given, "polykv_connect_options", given));
    }
    const ConnectOptions request{text_of(given.socket_path), text_of(given.client_name),
                                 given.timeout_ms};
    POLYKV_ASSIGN_OR_RETURN(auto session, Session::connect(request));
    *out = new polykv_session{std::move(session)};
    return Status::ok();
  });
}

void polykv_session_close(polykv_session* session) {
  if (session == nullptr) return;
  session->session->close();
  delete session;
}

polykv_status polykv_document_acquire(polykv_session* session,
                                      const polykv_acquire_options* options,
                                      polykv_lease** out_lease, polykv_publisher** out_publisher) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_session(session, "acquire"));
    POLYKV_RETURN_IF_ERROR(require(out_lease, "acquire", "out_lease"));
    polykv_acquire_options given{};
    POLYKV_RETURN_IF_ERROR(read_struct(options, sizeof given, "polykv_acquire_options", given));
    ModelIdentity model;
    POLYKV_ASSIGN_OR_RETURN(const AcquireRequest request, to_request(given, model));
    if (request.may_produce) {
      POLYKV_RETURN_IF_ERROR(require(out_publisher, "acquire", "out_publisher"));
    }
    POLYKV_ASSIGN_OR_RETURN(Acquired acquired, acquire(session->session, request));
    polykv_lease* lease = nullptr;
    polykv_publisher* publisher = nullptr;
    if (acquired.lease != nullptr) {
      lease = new polykv_lease(std::move(acquired.lease));
    } else if (out_publisher != nullptr) {
      publisher = new polykv_publisher{std::move(acquired.publisher)};
    } else {
      return {POLYKV_ERR_PROTOCOL, "acquire: polykvd made a producer of who did not offer it"};
    }
    *out_lease = lease;
    if (out_publisher != nullptr) *out_publisher = publisher;
    return Status::ok();
  });
}

polykv_status polykv_document_ingest(polykv_session* session, const polykv_ingest_options* options,
                                     polykv_lease** out_lease) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_session(session, "ingest"));
    polykv_ingest_options given{};
    POLYKV_RETURN_IF_ERROR(read_struct(options, sizeof given, "polykv_ingest_options", given));
    POLYKV_ASSIGN_OR_RETURN(IngestRequest request, to_request(given));
    request.want_lease = out_lease != nullptr;
    POLYKV_ASSIGN_OR_RETURN(auto lease, ingest(session->session, request));
    if (out_lease != nullptr) *out_lease = new polykv_lease(std::move(lease));
    return Status::ok();
  });
}

polykv_status polykv_document_list(polykv_session* session, polykv_document_callback callback,
                                   void* user) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_session(session, "list documents"));
    if (callback == nullptr) {
      return {POLYKV_ERR_INVALID_ARGUMENT, "list documents: callback is NULL"};
    }
    return list_documents(*session->session, [&](const DocumentRecord& record) {
      const DocumentView view(record);
      return callback(user, &view.info()) == 0;
    });
  });
}

polykv_status polykv_document_remove(polykv_session* session, const char* name,
                                     const uint8_t* digest) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_session(session, "remove"));
    POLYKV_RETURN_IF_ERROR(
        exactly_one("remove", "name and digest", (name != nullptr) + (digest != nullptr)));
    if (name != nullptr) POLYKV_RETURN_IF_ERROR(check_name(name));
    Digest value{};
    if (digest != nullptr) std::copy_n(digest, value.size(), value.begin());
    return remove_document(*session->session, text_of(name), digest == nullptr ? nullptr : &value);
  });
}

polykv_status polykv_session_daemon_status(polykv_session* session, polykv_daemon_status* out) {
  return guarded([&]() -> Status {
    POLYKV_RETURN_IF_ERROR(check_session(session, "ask for the daemon's status"));
    polykv_daemon_status status;
    polykv_daemon_status_init(&status);
    POLYKV_RETURN_IF_ERROR(read_daemon_status(*session->session, status));
    return write_struct(status, sizeof status, "polykv_daemon_status", out);
  });
}
