// What the daemon says about documents and about itself, as plain values.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "include/internal/geometry.h"
#include "include/internal/segment_format.h"
#include "libclient/session.h"
#include "polykv/polykv.h"

namespace polykv::lib {

/// How a layer is stored; see polykv_layer_quality.
struct LayerQuality {
  uint32_t profiles = 0;
  uint32_t query_count = 0;
  float relative_error = 0;
};

struct DocumentRecord {
  std::vector<std::string> names;
  Digest digest{};
  ModelIdentity identity;
  Profile profile = Profile::any;
  uint64_t token_count = 0;
  uint32_t segment_count = 0;
  uint64_t stored_bytes = 0;
  uint64_t bf16_bytes = 0;
  uint32_t lease_count = 0;
  std::string state;
  int64_t created_unix_ms = 0;
  bool is_public = false;
  uint64_t sealed_token_count = 0;
  uint64_t shared_bytes = 0;
  PrefixTreatment prefix_treatment = PrefixTreatment::none;
  std::vector<LayerQuality> layers;  // one a layer of the model
  std::string backing;
};
/// POLYKV_ERR_PROTOCOL when something a document must have is missing or out of range.
Result<DocumentRecord> from_wire(const wire::DocumentInfo* info);

/// Every document that the caller may see, page by page; `visit` returns false to end.
Status list_documents(Session& session, const std::function<bool(const DocumentRecord&)>& visit);

/// Exactly one of name (not empty) and digest (not null).
Status remove_document(Session& session, const std::string& name, const Digest* digest);

/// Fills all but struct_size.
Status read_daemon_status(Session& session, polykv_daemon_status& out);

}  // namespace polykv::lib
