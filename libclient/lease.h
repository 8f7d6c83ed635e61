// Lease: a document's segments, mapped read-only and validated.
//
// Reading needs no daemon and no lock: everything is immutable from construction to release.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "common/mapping.h"
#include "kernels/segment.h"
#include "libclient/document.h"
#include "libclient/session.h"

namespace polykv::lib {

/// A segment as far as its document uses it: tokens [first_token, first_token + token_count).
struct LeasedSegment {
  Mapping mapping;
  SegmentView view;
  uint64_t first_token = 0;  // of the document
  uint64_t token_count = 0;  // <= view.token_count(): a document may use a prefix of a segment
};

/// A token range of the document and where its K and V go; see DecodeTarget. Strides that are all 0
/// mean dense [token, kv_head, head_dim].
struct DecodeRequest {
  uint64_t first_token = 0;
  uint64_t token_count = 0;
  Dtype dtype = Dtype::f32;
  void* k = nullptr;
  Strides k_strides{0, 0, 0};
  void* v = nullptr;
  Strides v_strides{0, 0, 0};
};

class Lease {
 public:
  /// Takes the LeaseSegments events that follow `granted` in `exchange`, maps and checks each, and
  /// that together they are the document that its digest names. On failure the lease is given back.
  static Result<std::unique_ptr<Lease>> receive(const std::shared_ptr<Session>& session,
                                                Exchange& exchange,
                                                const wire::LeaseGranted& granted);

  const DocumentRecord& document() const { return document_; }
  std::span<const LeasedSegment> segments() const { return segments_; }
  uint32_t layer_count() const { return static_cast<uint32_t>(document_.identity.layers.size()); }
  const Session& session() const { return *session_; }

  Status copy_tokens(uint64_t first, uint64_t count, uint32_t* out) const;
  Status decode(uint32_t layer, const DecodeRequest& request) const;
  Status verify() const;
  /// A decoded cache of this layer is `view`'s payload; segment and layer are checked.
  Result<const LeasedSegment*> find_segment(uint32_t segment, uint32_t layer) const;

  /// Unmaps and tells the daemon. Once.
  Status release();

 private:
  Lease(std::shared_ptr<Session> session, const wire::Handle& handle)
      : session_(std::move(session)), handle_(handle) {}
  Status receive_segments(Exchange& exchange, uint32_t segment_count);
  Status add_segment(const UniqueFd& fd, const wire::SegmentInfo& info);
  Status check_document() const;

  std::shared_ptr<Session> session_;
  wire::Handle handle_;
  DocumentRecord document_;
  std::vector<LeasedSegment> segments_;
};

/// The strides that all 0 stand for: dense [token, kv_head, dim].
Strides dense_unless_given(const Strides& strides, uint32_t kv_head_count, uint32_t head_dim);

}  // namespace polykv::lib
