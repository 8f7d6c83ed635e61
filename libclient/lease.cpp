#include "libclient/lease.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>

#include "common/digest.h"
#include "libclient/quietly.h"

namespace polykv::lib {

namespace {

// A segment is mapped while its bytes are not read yet: only the next event's arrival can stall.
constexpr int64_t kSegmentsTimeoutMs = 60'000;

Status corrupt(size_t index, const std::string& what) {
  return {POLYKV_ERR_CORRUPT, format("open segment %zu: %s", index, what.c_str())};
}

/// The bytes can neither change nor go away under us (which would be SIGBUS). size_bytes 0: as many as
/// there are, which is returned.
Result<uint64_t> check_sealed(int fd, uint64_t size_bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_WRITE | F_SEAL_SHRINK;
  if (seals < 0 || (seals & kNeeded) != kNeeded) {
    return {POLYKV_ERR_CORRUPT, "its descriptor is not sealed against writing and shrinking"};
  }
  struct stat info;
  if (::fstat(fd, &info) != 0) return system_error("look at its descriptor", errno);
  const auto found = static_cast<uint64_t>(info.st_size);
  if (info.st_size <= 0 || (size_bytes != 0 && found != size_bytes)) {
    return {POLYKV_ERR_CORRUPT, format("%" PRIu64 " bytes were announced, it has %lld", size_bytes,
                                       static_cast<long long>(info.st_size))};
  }
  return found;
}

uint64_t end_of(const LeasedSegments& segments) {
  return segments.empty() ? 0 : segments.back()->first_token + segments.back()->token_count;
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
                                              Exchange exchange,
                                              const wire::LeaseGranted& granted) {
  if (granted.lease() == nullptr) return {POLYKV_ERR_PROTOCOL, "read a lease: it has no handle"};
  std::unique_ptr<Lease> lease(new Lease(session, *granted.lease()));
  lease->exchange_.emplace(std::move(exchange));
  Result<DocumentRecord> document = from_wire(granted.document());
  Status status = document.status();
  if (document.is_ok()) {
    lease->document_ = std::move(document).value();
    const bool is_growing = lease->document_.state == "filling";
    lease->segment_limit_ = is_growing ? SIZE_MAX : granted.segment_count();
    while (status.is_ok() && lease->segments()->size() < granted.segment_count())
      status = lease->receive_next(deadline_after_ms(kSegmentsTimeoutMs));
    if (status.is_ok() && !is_growing && lease->available_tokens() < lease->document_.token_count)
      status = {POLYKV_ERR_CORRUPT, "its segments do not add up to its tokens"};
  }
  if (!status.is_ok()) {
    static_cast<void>(lease->release().is_ok());
    return status.with_context("map a document");
  }
  return lease;
}

std::shared_ptr<const LeasedSegments> Lease::segments() const {
  const std::lock_guard lock(mutex_);
  return segments_;
}

Staging Lease::staging() const {
  const std::lock_guard lock(mutex_);
  return staging_;
}

void Lease::set_staging(Staging staging) {
  const std::lock_guard lock(mutex_);
  staging_ = std::move(staging);
}

uint64_t Lease::available_tokens() const {
  return end_of(*segments());
}

PrefixTreatment Lease::prefix_treatment() const {
  PrefixTreatment strongest = PrefixTreatment::none;
  const auto all = segments();
  for (const auto& segment : *all) strongest = stronger(strongest, segment->view.prefix());
  return strongest;
}

/// The next event of a lease that is not complete.
Status Lease::receive_next(Deadline deadline) {
  POLYKV_ASSIGN_OR_RETURN(const Message message, exchange_->next(deadline));
  if (const auto* stalled = message.as<wire::LeaseStalled>()) {
    if (stalled->is_final()) {
      return end_with(
          {POLYKV_ERR_PRODUCER_LOST, format("the document was dropped after %" PRIu64 " of %" PRIu64
                                            " tokens; acquire it anew",
                                            available_tokens(), document_.token_count)});
    }
    return {POLYKV_ERR_PRODUCER_LOST,
            format("its producer died, stalled or gave up after %" PRIu64 " of %" PRIu64
                   " tokens; wait again once somebody produces it, or acquire it anew",
                   available_tokens(), document_.token_count)};
  }
  const auto* event = message.as<wire::LeaseSegments>();
  if (event == nullptr) return unexpected_packet(message, wire::Body::LeaseSegments);
  auto longer = std::make_shared<LeasedSegments>(*segments());
  const auto* const memories = event->device_memories();
  if (memories != nullptr && memories->size() != message.fds.size())
    return {POLYKV_ERR_PROTOCOL, "segments and their device memories are not as many"};
  if (message.fds.empty() || event->first_index() != longer->size() ||
      message.fds.size() > segment_limit_ - longer->size()) {
    return {POLYKV_ERR_PROTOCOL, format("%zu segments from %u on came where %zu were there",
                                        message.fds.size(), event->first_index(), longer->size())};
  }
  uint64_t next_token = available_tokens();
  for (size_t i = 0; i < message.fds.size(); ++i) {
    const auto* info = event->segments()->Get(static_cast<uint32_t>(i));
    const auto* memory = memories == nullptr ? nullptr : memories->Get(static_cast<uint32_t>(i));
    POLYKV_ASSIGN_OR_RETURN(
        auto segment, open_segment(message.fds[i], *info, memory, longer->size(), next_token));
    next_token += segment->token_count;
    longer->push_back(std::move(segment));
  }
  if (next_token > document_.token_count) {
    return {POLYKV_ERR_CORRUPT, "its segments do not add up to its tokens"};
  }
  const auto received_count = static_cast<uint32_t>(longer->size());
  {
    const std::lock_guard lock(mutex_);
    segments_ = std::move(longer);
  }
  flatbuffers::FlatBufferBuilder builder;
  POLYKV_RETURN_IF_ERROR(
      session_->send(builder, wire::CreateSegmentAck(builder, &handle_, received_count)));
  if (next_token < document_.token_count) return Status::ok();
  exchange_.reset();
  const Status checked = check_document();
  return checked.is_ok() ? checked : end_with(checked);
}

Status Lease::end_with(Status why) {
  const std::lock_guard lock(mutex_);
  ended_ = std::move(why);
  return ended_;
}

Status Lease::wait_for(uint64_t token_count, Deadline deadline) {
  if (token_count > document_.token_count) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("wait for %" PRIu64 " tokens: the document has %" PRIu64, token_count,
                   document_.token_count)};
  }
  POLYKV_RETURN_IF_ERROR(session_->check_process("wait for a document"));
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!ended_.is_ok()) return ended_.with_context("wait for a document");
    if (end_of(*segments_) >= token_count) return Status::ok();
    if (is_released_) return {POLYKV_ERR_STALE, "wait for a document: the lease was released"};
    if (is_receiving_) {
      if (deadline == kNoDeadline) {
        changed_.wait(lock);
      } else if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
        return {POLYKV_ERR_TIMEOUT, "wait for a document: the deadline passed"};
      }
      continue;
    }
    is_receiving_ = true;
    lock.unlock();
    const Status received = receive_next(deadline);
    lock.lock();
    is_receiving_ = false;
    changed_.notify_all();
    if (!received.is_ok()) return received.with_context("wait for a document");
  }
}

Result<LeasedSegment> Lease::map_segment(const UniqueFd& fd, const wire::SegmentInfo& info,
                                         const wire::DeviceMemory* memory) const {
  if (memory == nullptr) {
    if (info.size_bytes() == 0) return {POLYKV_ERR_CORRUPT, "0 bytes were announced"};
    POLYKV_RETURN_IF_ERROR(check_sealed(fd.get(), info.size_bytes()).status());
    POLYKV_ASSIGN_OR_RETURN(Mapping mapping,
                            Mapping::map(fd.get(), info.size_bytes(), MapAccess::read_only));
    POLYKV_ASSIGN_OR_RETURN(SegmentView view, SegmentView::open(mapping.bytes()));
    return LeasedSegment{std::move(mapping), std::move(view), info.first_token(),
                         info.token_count(), nullptr};
  }
  const RemoteMemory remote = from_wire(*memory);
  if (remote.epoch != session_->epoch())
    return {POLYKV_ERR_STALE, "its device memory is of an earlier polykvd; acquire it anew"};
  if (info.size_bytes() > kMaxSegmentBytes)
    return {POLYKV_ERR_CORRUPT, "it is larger than any segment"};
  POLYKV_ASSIGN_OR_RETURN(const uint64_t metadata_bytes, check_sealed(fd.get(), 0));
  POLYKV_ASSIGN_OR_RETURN(device::SegmentImage image,
                          device::SegmentImage::map(fd.get(), metadata_bytes, info.size_bytes()));
  POLYKV_ASSIGN_OR_RETURN(SegmentView view, SegmentView::open(image.bytes()));
  const SegmentHeader& header = view.header();
  if (header.data_offset != metadata_bytes || header.total_bytes != info.size_bytes() ||
      remote.size_bytes < header.total_bytes - header.data_offset) {
    return {POLYKV_ERR_CORRUPT, "its sizes in host and device memory do not fit its header"};
  }
  POLYKV_RETURN_IF_ERROR(view.verify_header_checksum());
  auto device = std::make_unique<DeviceSegment>(session_, std::move(image), remote, metadata_bytes,
                                                view.layer_count());
  return LeasedSegment{Mapping(), std::move(view), info.first_token(), info.token_count(),
                       std::move(device)};
}

Result<std::shared_ptr<const LeasedSegment>> Lease::open_segment(const UniqueFd& fd,
                                                                 const wire::SegmentInfo& info,
                                                                 const wire::DeviceMemory* memory,
                                                                 size_t index,
                                                                 uint64_t next_token) const {
  Result<LeasedSegment> segment = map_segment(fd, info, memory);
  if (!segment.is_ok()) return segment.status().with_context(format("open segment %zu", index));
  const SegmentView* const view = &segment->view;

  const ModelIdentity& identity = document_.identity;
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
  return std::make_shared<const LeasedSegment>(std::move(segment).value());
}

/// Of a complete one.
Status Lease::check_document() const {
  std::vector<uint32_t> ids(document_.token_count);
  POLYKV_RETURN_IF_ERROR(copy_tokens(0, ids.size(), ids.data()));
  if (chain_digests(chain_root(document_.identity), ids).back() != document_.digest) {
    return {POLYKV_ERR_CORRUPT, "the token ids in its segments are not those of its digest"};
  }
  return Status::ok();
}

Status Lease::check_readable(const char* operation, uint64_t first, uint64_t count) const {
  if (first > document_.token_count || count > document_.token_count - first) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("%s: tokens %" PRIu64 " to %" PRIu64 "; the document has %" PRIu64, operation,
                   first, first + count, document_.token_count)};
  }
  const uint64_t available = available_tokens();
  if (first + count > available) {
    return {POLYKV_ERR_BUSY, format("%s: tokens %" PRIu64 " to %" PRIu64 "; %" PRIu64
                                    " are there yet, wait for the others",
                                    operation, first, first + count, available)};
  }
  return Status::ok();
}

Status Lease::copy_tokens(uint64_t first, uint64_t count, uint32_t* out) const {
  POLYKV_RETURN_IF_ERROR(check_readable("read tokens", first, count));
  const auto copy = [&](const LeasedSegment& segment, uint64_t begin, uint64_t end) {
    const auto ids = segment.view.token_ids().subspan(begin - segment.first_token, end - begin);
    std::copy(ids.begin(), ids.end(), out + (begin - first));
    return Status::ok();
  };
  return for_each_range(*segments(), first, first + count, copy);
}

Result<std::vector<SegmentTarget>> Lease::decode_targets(uint32_t layer,
                                                         const DecodeRequest& request) const {
  if (layer >= layer_count()) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("decode layer %u: the document has %u layers", layer, layer_count())};
  }
  const uint64_t first = request.first_token;
  POLYKV_RETURN_IF_ERROR(check_readable("decode", first, request.token_count));
  const LayerGeometry& geometry = document_.identity.layers[layer];
  DecodeTarget target;
  target.dtype = request.dtype;
  target.k_strides =
      dense_unless_given(request.k_strides, geometry.kv_head_count, geometry.k_head_dim);
  target.v_strides =
      dense_unless_given(request.v_strides, geometry.kv_head_count, geometry.v_head_dim);
  std::vector<SegmentTarget> targets;
  const auto all = segments();
  for (uint32_t i = 0; i < all->size(); ++i) {
    const LeasedSegment& segment = *(*all)[i];
    const auto [begin, end] = segment.tokens_of(first, first + request.token_count);
    if (begin >= end) continue;
    const auto done = static_cast<int64_t>(begin - first);
    target.first_token = begin - segment.first_token;
    target.token_count = end - begin;
    target.k = advance(request.k, done * target.k_strides.token, request.dtype);
    target.v = advance(request.v, done * target.v_strides.token, request.dtype);
    targets.push_back({i, &segment, target});
  }
  return targets;
}

Status Lease::decode(uint32_t layer, const DecodeRequest& request) const {
  POLYKV_ASSIGN_OR_RETURN(const std::vector<SegmentTarget> targets, decode_targets(layer, request));
  for (const SegmentTarget& part : targets) {
    POLYKV_RETURN_IF_ERROR(part.segment->fetch_layer(layer).with_context("decode"));
    POLYKV_RETURN_IF_ERROR(decode_layer(part.segment->view, layer, part.target));
  }
  return Status::ok();
}

Status LeasedSegment::verify() const {
  if (device == nullptr) return view.verify_checksums();
  POLYKV_RETURN_IF_ERROR(view.verify_header_checksum());
  return device->verify(view);
}

Status Lease::verify() const {
  const auto all = segments();
  for (size_t i = 0; i < all->size(); ++i) {
    const Status status = (*all)[i]->verify();
    if (!status.is_ok()) return status.with_context(format("verify segment %zu", i));
  }
  return Status::ok();
}

Result<const LeasedSegment*> Lease::find_segment(uint32_t segment, uint32_t layer) const {
  const auto all = segments();
  if (segment >= all->size() || layer >= layer_count()) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("view layer %u of segment %u: the document has %u layers and %zu segments",
                   layer, segment, layer_count(), all->size())};
  }
  return (*all)[segment].get();  // later lists have it as well
}

Lease::~Lease() {
  quietly([this] { static_cast<void>(release().is_ok()); });
}

Status Lease::release() {
  if (is_released_) return Status::ok();
  is_released_ = true;
  {
    const std::lock_guard lock(mutex_);
    segments_ = std::make_shared<const LeasedSegments>();
  }
  exchange_.reset();
  POLYKV_RETURN_IF_ERROR(session_->check_process("release a lease"));
  if (session_->closed_by_caller()) return Status::ok();
  flatbuffers::FlatBufferBuilder builder;
  return session_->call<wire::Done>(builder, wire::CreateRelease(builder, &handle_)).status();
}

}  // namespace polykv::lib
