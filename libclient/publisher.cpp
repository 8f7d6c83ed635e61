#include "libclient/publisher.h"

#include <algorithm>
#include <cinttypes>

#include "common/digest.h"
#include "libclient/acquire.h"
#include "libclient/quietly.h"

namespace polykv::lib {

namespace {

// The daemon allocates at a reservation and reads every byte at a commit: what even a slow machine
// does in a second.
constexpr uint64_t kBytesPerSecond = 50'000'000;

Deadline deadline_for_bytes(uint64_t size_bytes) {
  return deadline_after_ms(kReplyTimeoutMs +
                           static_cast<int64_t>(size_bytes / kBytesPerSecond) * 1000);
}

/// That it is there; fills in dense strides.
Status check_layer_source(const ModelIdentity& identity, uint32_t layer, KvSource& source) {
  const auto& layers = identity.layers;
  if (layer >= layers.size() || source.k == nullptr || source.v == nullptr) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            layer < layers.size()
                ? format("layer %u: K or V is missing", layer)
                : format("layer %u: the model has %zu layers", layer, layers.size())};
  }
  const LayerGeometry& geometry = layers[layer];
  source.k_strides =
      dense_unless_given(source.k_strides, geometry.kv_head_count, geometry.k_head_dim);
  source.v_strides =
      dense_unless_given(source.v_strides, geometry.kv_head_count, geometry.v_head_dim);
  return Status::ok();
}

}  // namespace

Result<std::shared_ptr<Publisher>> Publisher::create(const std::shared_ptr<Session>& session,
                                                     const wire::TicketGranted& ticket,
                                                     std::span<const uint32_t> tokens,
                                                     Profile profile) {
  if (ticket.ticket() == nullptr || ticket.model() == nullptr ||
      ticket.token_count() != tokens.size() || ticket.next_token() >= tokens.size()) {
    return {POLYKV_ERR_PROTOCOL, "read a ticket: it does not fit the tokens that were asked for"};
  }
  std::shared_ptr<Publisher> publisher(new Publisher(session));
  publisher->ticket_ = *ticket.ticket();
  POLYKV_ASSIGN_OR_RETURN(publisher->identity_, polykv::from_wire(*ticket.model()));
  publisher->profile_ = profile;
  publisher->tokens_.assign(tokens.begin(), tokens.end());
  publisher->digest_ = chain_digests(chain_root(publisher->identity_), tokens).back();
  publisher->next_token_ = ticket.next_token();
  publisher->examined_.resize(publisher->identity_.layers.size());
  return publisher;
}

Publisher::~Publisher() {
  quietly([this] { abort(); });
}

Status Publisher::check_usable(const char* operation) const {
  POLYKV_RETURN_IF_ERROR(session_->check_process(operation));
  if (ended_) {
    return {POLYKV_ERR_STALE, std::string(operation) + ": the publisher has ended"};
  }
  return Status::ok();
}

Result<uint64_t> Publisher::next_token_count(uint64_t wanted) const {
  const uint64_t left = tokens_.size() - next_token_;
  if (segment_open_ || left == 0) {
    return {POLYKV_ERR_INVALID_ARGUMENT, segment_open_
                                             ? "another one is open; commit or abort it first"
                                             : "every token is committed; finish the publisher"};
  }
  const bool is_single = is_single_segment(profile_);
  if (wanted == 0) return is_single ? left : std::min(kSegmentTokens, left);
  if (wanted > left || (is_single && wanted != left)) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("%" PRIu64 " tokens were asked for, %" PRIu64 " are left%s", wanted, left,
                   is_single ? ", and this profile takes one segment" : "")};
  }
  return wanted;
}

Status Publisher::examine_layer(uint64_t token_count, uint32_t layer, KvSource source,
                                LayerQueries queries) {
  POLYKV_RETURN_IF_ERROR(check_usable("examine a layer"));
  POLYKV_RETURN_IF_ERROR(check_layer_source(identity_, layer, source).with_context("examine"));
  const Result<uint64_t> count = next_token_count(token_count);
  if (!count.is_ok()) return count.status().with_context("examine a layer of the next segment");
  examined_[layer] = {};
  queries.strides =
      dense_unless_given(queries.strides, queries.head_count, identity_.layers[layer].k_head_dim);
  const LayerSpec spec{identity_.layers[layer], identity_.source_dtype, profile_, next_token_,
                       *count};
  Result<LayerChoice> choice = polykv::examine_layer(spec, source, queries);
  if (!choice.is_ok()) return choice.status().with_context(format("examine layer %u", layer));
  examined_[layer] = {*count, std::move(*choice)};
  return Status::ok();
}

/// Of the next segment; none when no layer was examined.
Result<std::vector<LayerChoice>> Publisher::choices_for(uint64_t token_count) const {
  const auto done = [&](const Examined& layer) { return layer.token_count == token_count; };
  const auto count = std::count_if(examined_.begin(), examined_.end(), done);
  const bool none = std::all_of(examined_.begin(), examined_.end(),
                                [](const Examined& layer) { return layer.token_count == 0; });
  if (none && profile_ != Profile::automatic) return std::vector<LayerChoice>();
  if (static_cast<size_t>(count) != examined_.size()) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("%zu of %zu layers were examined for %" PRIu64 " tokens; examine %s",
                   static_cast<size_t>(count), examined_.size(), token_count,
                   profile_ == Profile::automatic
                       ? "all, an `auto` document needs it, or choose another profile"
                       : "all of them or none")};
  }
  std::vector<LayerChoice> choices;
  for (const Examined& layer : examined_) choices.push_back(layer.choice);
  return choices;
}

Result<std::unique_ptr<OpenSegment>> Publisher::begin_segment(uint64_t wanted_tokens,
                                                              bool into_device) {
  POLYKV_RETURN_IF_ERROR(check_usable("begin a segment"));
  const Result<uint64_t> counted = next_token_count(wanted_tokens);
  if (!counted.is_ok()) return counted.status().with_context("begin a segment");
  const uint64_t token_count = *counted;
  Result<std::vector<LayerChoice>> choices = choices_for(token_count);
  if (!choices.is_ok()) return choices.status().with_context("begin a segment");
  SegmentSpec spec;
  spec.identity = identity_;
  spec.profile = profile_;
  spec.first_token = next_token_;
  spec.token_count = token_count;
  spec.digest_count =
      segment_digest_count(next_token_, token_count, next_token_ + token_count == tokens_.size());
  if (!choices->empty()) apply_choices(*choices, spec);
  POLYKV_ASSIGN_OR_RETURN(const SegmentLayout layout, plan_segment(spec));
  const uint64_t size_bytes = layout.header.total_bytes;

  flatbuffers::FlatBufferBuilder builder;
  std::vector<uint8_t> layer_profiles;
  for (const Profile profile : spec.layer_profiles)
    layer_profiles.push_back(static_cast<uint8_t>(profile));
  const auto profiles = builder.CreateVector(layer_profiles);
  const auto body = wire::CreateSegmentReserve(builder, &ticket_, next_token_, token_count,
                                               spec.chosen_exact_rows, spec.has_certificate,
                                               profiles, into_device);
  POLYKV_ASSIGN_OR_RETURN(
      const Message reply,
      session_->call<wire::SegmentReserved>(builder, body, {}, deadline_for_bytes(size_bytes)));
  const auto* reserved = reply.as<wire::SegmentReserved>();
  if (reserved->segment() == nullptr) {
    return {POLYKV_ERR_PROTOCOL, "begin a segment: the reply has no handle"};
  }
  segment_open_ = true;
  examined_.assign(identity_.layers.size(), {});
  // From here on its destructor gives the reservation back.
  std::unique_ptr<OpenSegment> segment(new OpenSegment);
  segment->publisher_ = shared_from_this();
  segment->handle_ = *reserved->segment();
  segment->first_token_ = next_token_;
  segment->token_count_ = token_count;
  segment->size_bytes_ = size_bytes;
  segment->choices_ = std::move(*choices);
  segment->is_on_device_.assign(identity_.layers.size(), 0);
  std::vector<Digest> digests;
  if (reserved->digests() != nullptr) {
    for (const wire::Digest* digest : *reserved->digests()) {
      digests.push_back(polykv::from_wire(*digest));
    }
  }
  if (reserved->size_bytes() != size_bytes || reserved->parent_digest() == nullptr ||
      digests.size() != spec.digest_count || reserved->root_digest() == nullptr ||
      polykv::from_wire(*reserved->root_digest()) != chain_root(identity_)) {
    return {POLYKV_ERR_PROTOCOL,
            format("begin a segment: polykvd planned %" PRIu64 " bytes and %zu digests, this "
                   "library %" PRIu64 " and %u; are they of the same version?",
                   reserved->size_bytes(), digests.size(), size_bytes, spec.digest_count)};
  }
  std::span<uint8_t> bytes;
  if (into_device) {
    POLYKV_RETURN_IF_ERROR(
        segment->open_memory(*reserved, reply.fds[0].get(), layout.header.data_offset));
    bytes = segment->image_->writable_bytes();
  } else {
    POLYKV_ASSIGN_OR_RETURN(segment->mapping_,
                            Mapping::map(reply.fds[0].get(), size_bytes, MapAccess::read_write));
    bytes = segment->mapping_.writable_bytes();
    POLYKV_RETURN_IF_ERROR(keep_from_children(bytes).with_context("begin a segment"));
  }
  SegmentContents contents;
  contents.token_ids = std::span(tokens_).subspan(next_token_, token_count);
  contents.parent = polykv::from_wire(*reserved->parent_digest());
  contents.digests = digests;
  contents.prefix = prefix_;
  POLYKV_ASSIGN_OR_RETURN(segment->writer_, SegmentWriter::create(spec, contents, bytes));
  return segment;
}

Status Publisher::progress(uint64_t tokens_done) {
  POLYKV_RETURN_IF_ERROR(check_usable("report progress"));
  flatbuffers::FlatBufferBuilder builder;
  const auto body = wire::CreateTicketProgress(builder, &ticket_, tokens_done);
  return session_->call<wire::Done>(builder, body).status();
}

Status Publisher::finish() {
  POLYKV_RETURN_IF_ERROR(check_usable("finish publishing"));
  if (segment_open_ || next_token_ != tokens_.size()) {
    const uint64_t done = next_token_;
    abort();
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("finish publishing: %" PRIu64 " of %zu tokens are committed; it was given up",
                   done, tokens_.size())};
  }
  ended_ = true;
  return Status::ok();
}

Result<std::unique_ptr<Lease>> Publisher::finish_with_lease() {
  POLYKV_RETURN_IF_ERROR(finish());
  AcquireRequest request;
  request.digest = digest_;
  request.profile = profile_;
  POLYKV_ASSIGN_OR_RETURN(Acquired acquired, acquire(session_, request));
  return std::move(acquired.lease);
}

Result<std::unique_ptr<Lease>> Publisher::acquire_sealed() {
  POLYKV_RETURN_IF_ERROR(check_usable("acquire what is sealed"));
  AcquireRequest request;
  request.ticket = &ticket_;
  POLYKV_ASSIGN_OR_RETURN(Acquired acquired, acquire(session_, request));
  prefix_ = PrefixTreatment::decoded;
  return std::move(acquired.lease);
}

void Publisher::abort() {
  if (ended_) return;
  ended_ = true;
  // The last commit ended the ticket already.
  if (next_token_ == tokens_.size()) return;
  if (!session_->check_process("abort").is_ok() || session_->closed_by_caller()) return;
  flatbuffers::FlatBufferBuilder builder;
  const auto body = wire::CreateTicketAbort(builder, &ticket_);
  static_cast<void>(session_->call<wire::Done>(builder, body).is_ok());
}

OpenSegment::~OpenSegment() {
  quietly([this] { abort(); });
}

Status OpenSegment::encode_with(
    uint32_t layer, KvSource source,
    const std::function<Status(const KvSource&, std::span<const uint32_t>)>& encode) {
  POLYKV_RETURN_IF_ERROR(publisher_->check_usable("encode a layer"));
  POLYKV_RETURN_IF_ERROR(
      check_layer_source(publisher_->identity_, layer, source).with_context("encode"));
  if (choices_.empty()) return encode(source, {});
  const LayerChoice& choice = choices_[layer];
  POLYKV_RETURN_IF_ERROR(encode(source, choice.exact_tokens));
  return writer_->set_certificate(layer, choice.certificate.relative_error,
                                  choice.certificate.query_count);
}

Status OpenSegment::encode_layer(uint32_t layer, KvSource source) {
  return encode_with(layer, source, [&](const KvSource& kv, std::span<const uint32_t> exact) {
    return writer_->encode_layer(layer, kv, exact);
  });
}

Status OpenSegment::encode_layer_on_device(uint32_t layer, KvSource source, EncodePlace place) {
  return encode_with(layer, source, [&](const KvSource& kv, std::span<const uint32_t> exact) {
    return writer_->fill_layer(layer, exact, [&](LayerSlot& slot) -> Status {
      const std::span<uint8_t> payload = writer_->layer_payload(layer);
      if (device_) {
        place.gpu = device_->gpu();
        place.payload = device_address(payload.data());
      }
      POLYKV_RETURN_IF_ERROR(encode_on_device(kv, slot, payload, place));
      is_on_device_[layer] = device_ ? 1 : 0;
      return Status::ok();
    });
  });
}

uint8_t* OpenSegment::device_address(const uint8_t* host) const {
  const uint8_t* const start = image_->bytes().data() + writer_->header().data_offset;
  return static_cast<uint8_t*>(device_->pointer()) + (host - start);
}

Result<uint64_t> OpenSegment::device_workspace_bytes(uint32_t layer) {
  POLYKV_RETURN_IF_ERROR(publisher_->check_usable("encode a layer on a GPU"));
  const size_t layer_count = publisher_->identity_.layers.size();
  if (layer >= layer_count) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("encode layer %u on a GPU: the model has %zu layers", layer, layer_count)};
  }
  // Exact rows need no more than their places in the payload.
  return encode_workspace_bytes(writer_->layer_slot(layer),
                                device_ ? 0 : writer_->layer_payload(layer).size());
}

Status OpenSegment::open_memory(const wire::SegmentReserved& reserved, int fd,
                                uint64_t data_offset) {
  const Session& session = *publisher_->session_;
  if (reserved.device_memory() == nullptr)
    return {POLYKV_ERR_PROTOCOL, "begin a segment: the reply has no device memory"};
  const RemoteMemory remote = from_wire(*reserved.device_memory());
  if (remote.epoch != session.epoch() || remote.size_bytes < size_bytes_ - data_offset)
    return {POLYKV_ERR_PROTOCOL, "begin a segment: the device memory is not for it"};
  POLYKV_ASSIGN_OR_RETURN(device::Runtime* const runtime, client_runtime(session.device_driver()));
  POLYKV_ASSIGN_OR_RETURN(const Gpu gpu, find_gpu(*runtime, remote.device_uuid));
  POLYKV_ASSIGN_OR_RETURN(
      image_, device::SegmentImage::map(fd, data_offset, size_bytes_, MapAccess::read_write));
  POLYKV_RETURN_IF_ERROR(keep_from_children(image_->bytes()).with_context("begin a segment"));
  POLYKV_ASSIGN_OR_RETURN(device_, OpenedMemory::open(gpu, remote));
  return Status::ok();
}

/// Done when it returns: the daemon reads the memory after the commit, from a stream of its own.
Status OpenSegment::move_to_device() {
  const Gpu& gpu = device_->gpu();
  POLYKV_RETURN_IF_ERROR(gpu.runtime->use_device(gpu.index));
  for (uint32_t layer = 0; layer < is_on_device_.size(); ++layer) {
    if (is_on_device_[layer] != 0) continue;
    const std::span<const uint8_t> payload = writer_->layer_payload(layer);
    POLYKV_RETURN_IF_ERROR(gpu.runtime->copy_to_device(device_address(payload.data()),
                                                       payload.data(), payload.size()));
  }
  POLYKV_RETURN_IF_ERROR(gpu.runtime->synchronize_device());
  return device_->close();
}

Status OpenSegment::commit() {
  POLYKV_RETURN_IF_ERROR(publisher_->check_usable("commit a segment"));
  Status finished = writer_->finish();
  if (finished.is_ok() && device_) finished = move_to_device();
  if (!finished.is_ok()) {
    abort();
    return finished.with_context("commit a segment");
  }
  // The kernel refuses the seal against writing while any writable mapping exists.
  unmap();
  ended_ = true;
  publisher_->segment_open_ = false;
  flatbuffers::FlatBufferBuilder builder;
  const auto body = wire::CreateSegmentCommit(builder, &handle_);
  POLYKV_RETURN_IF_ERROR(
      publisher_->session_->call<wire::Done>(builder, body, {}, deadline_for_bytes(size_bytes_))
          .status());
  publisher_->next_token_ = first_token_ + token_count_;
  return Status::ok();
}

void OpenSegment::unmap() noexcept {
  if (publisher_->session_->is_in_child()) {
    mapping_.forget();
    if (image_) image_->forget();
  }
  writer_.reset();
  mapping_.reset();
  image_.reset();
  device_.reset();
}

void OpenSegment::abort() {
  if (ended_) return;
  ended_ = true;
  unmap();
  publisher_->segment_open_ = false;
  if (!publisher_->check_usable("abort").is_ok() || publisher_->session_->closed_by_caller()) {
    return;  // the daemon has forgotten it, or will with the parent's own abort
  }
  flatbuffers::FlatBufferBuilder builder;
  const auto body = wire::CreateSegmentAbort(builder, &handle_);
  static_cast<void>(publisher_->session_->call<wire::Done>(builder, body).is_ok());
}

}  // namespace polykv::lib
