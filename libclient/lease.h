// Lease: a document's segments, mapped read-only and validated.
//
// Reading needs no daemon: what was mapped is immutable until release. While its document is still
// being produced a lease grows, by wait_for() alone.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "common/mapping.h"
#include "kernels/segment.h"
#include "libclient/cuda/device_segment.h"
#include "libclient/document.h"
#include "libclient/session.h"
#include "libclient/worker_team.h"

namespace polykv::lib {

/// A segment as far as its document uses it: tokens [first_token, first_token + token_count).
struct LeasedSegment {
  Mapping mapping;  // not of one in device memory
  SegmentView view;
  uint64_t first_token = 0;  // of the document
  uint64_t token_count = 0;  // <= view.token_count(): a document may use a prefix of a segment
  std::unique_ptr<DeviceSegment> device;  // null: the mapping has all of it

  /// Before the view's layer is read: its payload is in host memory from then on.
  Status fetch_layer(uint32_t layer) const {
    return device ? device->fetch_layer(layer, view.layer_record(layer)) : Status::ok();
  }
  Status verify() const;
  /// Those of [first, last) of the document that it has: [begin, end), empty if begin >= end.
  std::pair<uint64_t, uint64_t> tokens_of(uint64_t first, uint64_t last) const {
    return {std::max(first, first_token), std::min(last, first_token + token_count)};
  }
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

/// The part of a DecodeRequest that one segment serves.
struct SegmentTarget {
  uint32_t index = 0;  // of the segment
  const LeasedSegment* segment = nullptr;
  DecodeTarget target;
};

/// In token order, without a gap; the segments outlive every list that they are in.
using LeasedSegments = std::vector<std::shared_ptr<const LeasedSegment>>;

/// Calls action(segment, begin, end) for each segment that has tokens of [first, last) of the
/// document: it has those of [begin, end). The first failing Status ends it.
template <typename Action>
Status for_each_range(const LeasedSegments& segments, uint64_t first, uint64_t last,
                      Action action) {
  for (const auto& segment : segments) {
    const auto [begin, end] = segment->tokens_of(first, last);
    if (begin < end) POLYKV_RETURN_IF_ERROR(action(*segment, begin, end));
  }
  return Status::ok();
}

/// Where a document in host memory was copied to for a GPU; the memory is the caller's.
struct Staging {
  Gpu gpu;
  std::vector<const void*> segments;  // payload parts, in order
};

/// Threads may read at once, also while another one waits for more; release() is for the last.
class Lease {
 public:
  /// Takes the LeaseSegments events that follow `granted` in `exchange`, maps and checks each, and,
  /// once all are there, that together they are the document that its digest names. On failure the
  /// lease is given back.
  static Result<std::unique_ptr<Lease>> receive(const std::shared_ptr<Session>& session,
                                                Exchange exchange,
                                                const wire::LeaseGranted& granted);

  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  /// As of the grant: what was not sealed then is told by available_tokens().
  const DocumentRecord& document() const { return document_; }
  std::shared_ptr<const LeasedSegments> segments() const;
  /// Tokens 0 .. this can be read.
  uint64_t available_tokens() const;
  /// The strongest of its segments: decoded, else recomputed, else none.
  PrefixTreatment prefix_treatment() const;
  /// Until the first token_count tokens can be read. POLYKV_ERR_TIMEOUT; POLYKV_ERR_PRODUCER_LOST:
  /// nobody produces the rest at the moment (what is there stays readable, and one may wait again);
  /// POLYKV_ERR_INVALID_ARGUMENT: the document is shorter. One thread at a time waits, others queue.
  Status wait_for(uint64_t token_count, Deadline deadline);
  uint32_t layer_count() const { return static_cast<uint32_t>(document_.identity.layers.size()); }
  const Session& session() const { return *session_; }

  /// POLYKV_ERR_INVALID_ARGUMENT: beyond the document; POLYKV_ERR_BUSY: not sealed yet.
  Status check_readable(const char* operation, uint64_t first, uint64_t count) const;
  Status copy_tokens(uint64_t first, uint64_t count, uint32_t* out) const;
  Status decode(uint32_t layer, const DecodeRequest& request) const;
  /// What decode() does, in token order; the pointers in the request are not followed. Segments live
  /// as long as the lease.
  Result<std::vector<SegmentTarget>> decode_targets(uint32_t layer,
                                                    const DecodeRequest& request) const;
  Status verify() const;
  /// A decoded cache of this layer is `view`'s payload; segment and layer are checked.
  Result<const LeasedSegment*> find_segment(uint32_t segment, uint32_t layer) const;
  /// What the last set_staging() said; empty before.
  Staging staging() const;
  void set_staging(Staging staging);
  /// For calls that read with several threads.
  WorkerTeam& workers() const { return workers_; }

  /// Unmaps and tells the daemon; the destructor does the same and drops the answer. Once, and not
  /// while another thread uses the lease.
  Status release();

 private:
  Lease(std::shared_ptr<Session> session, const wire::Handle& handle)
      : session_(std::move(session)), handle_(handle) {}
  Status receive_next(Deadline deadline);
  Status end_with(Status why);
  Result<std::shared_ptr<const LeasedSegment>> open_segment(const UniqueFd& fd,
                                                            const wire::SegmentInfo& info,
                                                            const wire::DeviceMemory* memory,
                                                            size_t index,
                                                            uint64_t next_token) const;
  Result<LeasedSegment> map_segment(const UniqueFd& fd, const wire::SegmentInfo& info,
                                    const wire::DeviceMemory* memory) const;
  Status check_document() const;

  std::shared_ptr<Session> session_;
  wire::Handle handle_;
  DocumentRecord document_;
  std::optional<Exchange> exchange_;  // while segments are to come
  size_t segment_limit_ = 0;          // how many may come in all
  bool is_released_ = false;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool is_receiving_ = false;  // a thread is in receive_next()
  Status ended_;               // why no more can come
  Staging staging_;
  std::shared_ptr<const LeasedSegments> segments_ = std::make_shared<const LeasedSegments>();

  mutable WorkerTeam workers_;
};

/// The strides that all 0 stand for: dense [token, kv_head, dim].
Strides dense_unless_given(const Strides& strides, uint32_t kv_head_count, uint32_t head_dim);

}  // namespace polykv::lib
