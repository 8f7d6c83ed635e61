#include "libclient/lease.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>

#include "common/digest.h"

namespace polykv::lib {

namespace {

// A segment is mapped while its bytes are not read yet: only the next event's arrival can stall.
constexpr int64_t kSegmentsTimeoutMs = 60'000;

Status corrupt(size_t index, const std::string& what) {
  return {POLYKV_ERR_CORRUPT, format("open segment %zu: %s", index, what.c_str())};
}

/// The bytes can neither change nor go away under us (which would be SIGBUS).
Status check_sealed(int fd, uint64_t size_bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_WRITE | F_SEAL_SHRINK;
  if (seals < 0 || (seals & kNeeded) != kNeeded) {
    return {POLYKV_ERR_CORRUPT, "its descriptor is not sealed against writing and shrinking"};
  }
  struct stat info;
  if (::fstat(fd, &info) != 0) return system_error("look at its descriptor", errno);
  if (info.st_size < 0 || static_cast<uint64_t>(info.st_size) != size_bytes || size_bytes == 0) {
    return {POLYKV_ERR_CORRUPT, format("%" PRIu64 " bytes were announced, it has %lld", size_bytes,
                                       static_cast<long long>(info.st_size))};
  }
  return Status::ok();
}

void* advance(void* base, int64_t elements, Dtype dtype) {
  if (base == nullptr) return nullptr;
  return static_cast<uint8_t*>(base) + elements * static_cast<int64_t>(dtype_size_bytes(dtype));
}

}  // namespace

Strides dense_unless_given(const Strides& strides, uint32_t kv_head_count, uint32_t head_dim) {
  if (strides.head != 0 || strides.token != 0 || strides.dim != 0) return strides;
  return {head_dim, int64_t{kv_head_count} * head_dim, 1};
}

Result<std::unique_ptr<Lease>> Lease::receive(const std::shared_ptr<Session>& session,
                                              Exchange& exchange,
                                              const wire::LeaseGranted& granted) {
  if (granted.lease() == nullptr) return {POLYKV_ERR_PROTOCOL, "read a lease: it has no handle"};
  std::unique_ptr<Lease> lease(new Lease(session, *granted.lease()));
  Result<DocumentRecord> document = from_wire(granted.document());
  Status status = document.status();
  if (document.is_ok()) {
    lease->document_ = std::move(document).value();
    status = lease->receive_segments(exchange, granted.segment_count());
    if (status.is_ok()) status = lease->check_document();
  }
  if (!status.is_ok()) {
    static_cast<void>(lease->release().is_ok());
    return status.with_context("map a document");
  }
  return lease;
}

Status Lease::receive_segments(Exchange& exchange, uint32_t segment_count) {
  while (segments_.size() < segment_count) {
    POLYKV_ASSIGN_OR_RETURN(const Message message, exchange.next_as<wire::LeaseSegments>(
                                                       deadline_after_ms(kSegmentsTimeoutMs)));
    const auto* event = message.as<wire::LeaseSegments>();
    if (message.fds.empty() || event->first_index() != segments_.size() ||
        message.fds.size() > segment_count - segments_.size()) {
      return {POLYKV_ERR_PROTOCOL,
              format("%zu segments from %u on came where %zu of %u were there", message.fds.size(),
                     event->first_index(), segments_.size(), segment_count)};
    }
    for (size_t i = 0; i < message.fds.size(); ++i) {
      const auto* info = event->segments()->Get(static_cast<uint32_t>(i));
      const Status added = add_segment(message.fds[i], *info);
      if (!added.is_ok()) return added;
    }
    flatbuffers::FlatBufferBuilder builder;
    POLYKV_RETURN_IF_ERROR(session_->send(
        builder,
        wire::CreateSegmentAck(builder, &handle_, static_cast<uint32_t>(segments_.size()))));
  }
  return Status::ok();
}

Status Lease::add_segment(const UniqueFd& fd, const wire::SegmentInfo& info) {
  const size_t index = segments_.size();
  const auto here = [&](const Status& status) {
    return status.with_context(format("open segment %zu", index));
  };
  if (const Status sealed = check_sealed(fd.get(), info.size_bytes()); !sealed.is_ok()) {
    return here(sealed);
  }
  Result<Mapping> mapping = Mapping::map(fd.get(), info.size_bytes(), MapAccess::read_only);
  if (!mapping.is_ok()) return here(mapping.status());
  Result<SegmentView> view = SegmentView::open(mapping->bytes());
  if (!view.is_ok()) return here(view.status());

  const ModelIdentity& identity = document_.identity;
  const uint64_t next_token =
      segments_.empty() ? 0 : segments_.back().first_token + segments_.back().token_count;
  if (info.first_token() != next_token || view->first_token() != next_token) {
    return corrupt(index, format("it begins at token %" PRIu64 " where %" PRIu64 " was next",
                                 view->first_token(), next_token));
  }
  if (info.token_count() == 0 || info.token_count() > view->token_count()) {
    return corrupt(index, format("%" PRIu64 " of its %" PRIu64 " tokens are said to be used",
                                 info.token_count(), view->token_count()));
  }
  if (view->profile() != document_.profile || view->root_digest() != chain_root(identity) ||
      view->identity().layers != identity.layers) {
    return corrupt(index, "profile, geometry or model differ from the document's");
  }
  segments_.push_back({std::move(mapping).value(), std::move(view).value(), info.first_token(),
                       info.token_count()});
  return Status::ok();
}

Status Lease::check_document() const {
  std::vector<uint32_t> ids(document_.token_count);
  if (segments_.empty() ||
      segments_.back().first_token + segments_.back().token_count != ids.size()) {
    return {POLYKV_ERR_CORRUPT, "its segments do not add up to its tokens"};
  }
  POLYKV_RETURN_IF_ERROR(copy_tokens(0, ids.size(), ids.data()));
  if (chain_digests(chain_root(document_.identity), ids).back() != document_.digest) {
    return {POLYKV_ERR_CORRUPT, "the token ids in its segments are not those of its digest"};
  }
  return Status::ok();
}

Status Lease::copy_tokens(uint64_t first, uint64_t count, uint32_t* out) const {
  if (first > document_.token_count || count > document_.token_count - first) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("read tokens %" PRIu64 " to %" PRIu64 ": the document has %" PRIu64, first,
                   first + count, document_.token_count)};
  }
  for (const LeasedSegment& segment : segments_) {
    const uint64_t begin = std::max(first, segment.first_token);
    const uint64_t end = std::min(first + count, segment.first_token + segment.token_count);
    if (begin >= end) continue;
    const auto ids = segment.view.token_ids().subspan(begin - segment.first_token, end - begin);
    std::copy(ids.begin(), ids.end(), out + (begin - first));
  }
  return Status::ok();
}

Status Lease::decode(uint32_t layer, const DecodeRequest& request) const {
  if (layer >= layer_count()) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("decode layer %u: the document has %u layers", layer, layer_count())};
  }
  const uint64_t first = request.first_token;
  if (first > document_.token_count || request.token_count > document_.token_count - first) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("decode %" PRIu64 " tokens from %" PRIu64 " on: the document has %" PRIu64,
                   request.token_count, first, document_.token_count)};
  }
  const LayerGeometry& geometry = document_.identity.layers[layer];
  DecodeTarget target;
  target.dtype = request.dtype;
  target.k_strides =
      dense_unless_given(request.k_strides, geometry.kv_head_count, geometry.k_head_dim);
  target.v_strides =
      dense_unless_given(request.v_strides, geometry.kv_head_count, geometry.v_head_dim);
  for (const LeasedSegment& segment : segments_) {
    const uint64_t begin = std::max(first, segment.first_token);
    const uint64_t end =
        std::min(first + request.token_count, segment.first_token + segment.token_count);
    if (begin >= end) continue;
    const auto done = static_cast<int64_t>(begin - first);
    target.first_token = begin - segment.first_token;
    target.token_count = end - begin;
    target.k = advance(request.k, done * target.k_strides.token, request.dtype);
    target.v = advance(request.v, done * target.v_strides.token, request.dtype);
    POLYKV_RETURN_IF_ERROR(decode_layer(segment.view, layer, target));
  }
  return Status::ok();
}

Status Lease::verify() const {
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Status status = segments_[i].view.verify_checksums();
    if (!status.is_ok()) return status.with_context(format("verify segment %zu", i));
  }
  return Status::ok();
}

Result<const LeasedSegment*> Lease::find_segment(uint32_t segment, uint32_t layer) const {
  if (segment >= segments_.size() || layer >= layer_count()) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("view layer %u of segment %u: the document has %u layers and %zu segments",
                   layer, segment, layer_count(), segments_.size())};
  }
  return &segments_[segment];
}

Status Lease::release() {
  segments_.clear();
  POLYKV_RETURN_IF_ERROR(session_->check_process("release a lease"));
  if (session_->closed_by_caller()) return Status::ok();
  flatbuffers::FlatBufferBuilder builder;
  return session_->call<wire::Done>(builder, wire::CreateRelease(builder, &handle_)).status();
}

}  // namespace polykv::lib
