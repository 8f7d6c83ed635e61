// The two requests that end in a lease: acquire (find it, or become its producer) and ingest (let
// the daemon compute it).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "libclient/lease.h"
#include "libclient/publisher.h"

namespace polykv::lib {

/// Which document: exactly one of name, digest, model, model_name and model_fd; tokens with the
/// last three only. Borrowed during the call.
struct AcquireRequest {
  std::string name;
  std::optional<Digest> digest;
  const ModelIdentity* model = nullptr;
  std::string model_name;
  int model_fd = -1;
  std::span<const uint32_t> tokens;
  Profile profile = Profile::any;
  bool may_produce = false;
  bool wait = false;
  bool replace_name = false;
  int64_t timeout_ms = 600'000;  // for wait; negative: without limit
  std::string publish_name;
  uint64_t job = 0;        // of a worker: the job it is for
  bool is_public = false;  // of a worker
  bool stream = false;     // take a lease on a document that is being produced
  /// With tokens: the document that they begin with, all of which is used.
  std::optional<Digest> extends;
  const wire::Handle* ticket = nullptr;  // instead of all that: what it has sealed
};

/// Exactly one is set.
struct Acquired {
  std::unique_ptr<Lease> lease;
  std::shared_ptr<Publisher> publisher;
};

Result<Acquired> acquire(const std::shared_ptr<Session>& session, const AcquireRequest& request);

/// Exactly one of model_name and model_fd, and of text_fd and tokens. Borrowed during the call.
struct IngestRequest {
  std::string name;
  std::string model_name;
  int model_fd = -1;
  int text_fd = -1;
  std::span<const uint32_t> tokens;
  int before_fd = -1;
  Profile profile = Profile::k5v4;
  bool add_bos = false;
  bool parse_special = false;
  bool chat_head = false;
  bool replace_name = false;
  bool share_public = false;
  bool want_lease = true;
  /// The text continues this document; at most one of the two.
  std::string extend_name;
  std::optional<Digest> extend_digest;
  bool recompute_prefix = false;
  int64_t timeout_ms = -1;
  /// Called on the calling thread; false cancels.
  std::function<bool(const polykv_ingest_progress&)> on_progress;
};

/// Null without want_lease.
Result<std::unique_ptr<Lease>> ingest(const std::shared_ptr<Session>& session,
                                      const IngestRequest& request);

}  // namespace polykv::lib
