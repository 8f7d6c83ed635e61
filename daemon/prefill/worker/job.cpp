#include "daemon/prefill/worker/job.h"

#include <algorithm>

#include "common/digest.h"
#include "common/memfd.h"
#include "daemon/prefill/worker/text_input.h"
#include "libclient/acquire.h"

namespace polykv {

Job::Job(std::shared_ptr<lib::Session> session, const PrefillModel& model, Computer& computer,
         const FreeMemory& free_memory, const JobLimits& limits, const wire::JobStart& start,
         std::vector<UniqueFd> fds)
    : session_(std::move(session)),
      model_(model),
      computer_(computer),
      free_memory_(free_memory),
      limits_(limits),
      job_(start.job()),
      profile_(static_cast<Profile>(start.profile())),
      has_text_(start.has_text_fd()),
      listed_token_count_(start.token_count()),
      recompute_prefix_(start.recompute_prefix() || !computer.reads_sealed()),
      control_group_free_bytes_(start.control_group_free_bytes()) {
  if (start.extends() != nullptr) extends_ = from_wire(*start.extends());
  how_.chat_head = start.chat_head();
  how_.options.add_bos = start.add_bos();
  how_.options.parse_special = start.parse_special();
  // The session has checked how many there are.
  input_ = std::move(fds[0]);
  if (start.has_before_fd()) before_ = std::move(fds[1]);
}

JobResult Job::run() {
  result_.status = run_steps();
  // What ended the connection says more than what failed because of it.
  if (!session_status_.is_ok()) result_.status = session_status_;
  return std::move(result_);
}

Status Job::run_steps() {
  POLYKV_RETURN_IF_ERROR(check_profile(profile_, model_.identity().layers));
  POLYKV_RETURN_IF_ERROR(keep_alive(POLYKV_INGEST_TOKENIZING, 0));
  POLYKV_ASSIGN_OR_RETURN(ids_, has_text_ ? read_ids() : read_id_list());
  if (extends_) POLYKV_RETURN_IF_ERROR(read_base());
  POLYKV_RETURN_IF_ERROR(check_ids());
  result_.digest = chain_digests(chain_root(model_.identity()), ids_).back();

  const auto token_count = static_cast<uint32_t>(ids_.size());
  const auto segment_tokens = static_cast<uint32_t>(
      is_single_segment(profile_) ? token_count
                                  : std::min<uint64_t>(token_count, lib::kSegmentTokens));
  const DocumentSize size{model_.config(), model_.has_tied_output(), token_count, segment_tokens};
  memory_bytes_ = computer_.host_memory(size).total_bytes();
  POLYKV_RETURN_IF_ERROR(keep_alive(POLYKV_INGEST_TOKENIZING, 0));

  POLYKV_ASSIGN_OR_RETURN(const std::shared_ptr<lib::Publisher> publisher, acquire());
  if (publisher == nullptr) return Status::ok();
  Status status = check_memory(size);
  if (status.is_ok()) status = load_weights(*publisher);
  if (status.is_ok()) status = prefill(*publisher);
  if (!status.is_ok()) publisher->abort();
  return status;
}

Result<std::vector<uint32_t>> Job::read_ids() {
  TextLimits limits;
  limits.max_bytes = limits_.text_bytes;
  const auto alive = [this, last = lib::Clock::now()]() mutable {
    const auto now = lib::Clock::now();
    if (now - last < std::chrono::milliseconds(heartbeat_ms())) return true;
    last = now;
    return keep_alive(POLYKV_INGEST_TOKENIZING, 0).is_ok();
  };
  POLYKV_ASSIGN_OR_RETURN(const std::string text,
                          read_text(input_.get(), "the text", limits, alive));
  std::string before;
  if (before_) {
    POLYKV_ASSIGN_OR_RETURN(before,
                            read_text(before_.get(), "the text to put before", limits, alive));
  }
  input_.reset();
  before_.reset();
  DocumentText document = how_;
  document.text = text;
  document.before = before;
  return tokenize_document(model_.tokenizer(), model_.gguf(), document);
}

Result<std::vector<uint32_t>> Job::read_id_list() {
  POLYKV_ASSIGN_OR_RETURN(std::vector<uint32_t> ids,
                          memfd_read_tokens(input_.get(), listed_token_count_, kMaxTokens));
  input_.reset();
  return ids;
}

/// The ids of the document that is extended, in front of the new ones.
Status Job::read_base() {
  if (ids_.empty()) {
    return {POLYKV_ERR_EMPTY_DOCUMENT, "ingest: there are no tokens to extend the document by"};
  }
  lib::AcquireRequest request;
  request.digest = extends_;
  request.profile = profile_;
  request.job = job_;
  const Result<lib::Acquired> acquired = lib::acquire(session_, request);
  if (acquired.status().code() == POLYKV_ERR_NOT_FOUND) {
    return {POLYKV_ERR_BUSY,
            "ingest: the document to extend was extended, removed or evicted meanwhile; extend it "
            "again"};
  }
  if (!acquired.is_ok()) return acquired.status();
  const lib::Lease& base = *acquired->lease;
  if (chain_root(base.document().identity) != chain_root(model_.identity())) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "ingest: the document to extend was computed with another model; give that one"};
  }
  base_tokens_ = base.document().token_count;
  std::vector<uint32_t> ids(base_tokens_);
  POLYKV_RETURN_IF_ERROR(base.copy_tokens(0, base_tokens_, ids.data()));
  ids.insert(ids.end(), ids_.begin(), ids_.end());
  ids_ = std::move(ids);
  return acquired->lease->release();
}

Status Job::check_ids() const {
  const ModelConfig& config = model_.config();
  if (ids_.empty()) {
    return {POLYKV_ERR_EMPTY_DOCUMENT, "ingest: the document has no tokens; give a file with text"};
  }
  if (ids_.size() > config.context_length) {
    return {POLYKV_ERR_CONTEXT_EXCEEDED,
            format("ingest: the document has %zu tokens, but the model's context is %u; cut the "
                   "document or take another model",
                   ids_.size(), config.context_length)};
  }
  for (size_t i = 0; i < ids_.size(); ++i) {
    if (ids_[i] >= config.vocab_size) {
      return {POLYKV_ERR_INVALID_ARGUMENT,
              format("ingest: token %zu has id %u, but the model's vocabulary ends at %u; tokenize "
                     "with this very model",
                     i, ids_[i], config.vocab_size - 1)};
    }
  }
  return Status::ok();
}

Result<std::shared_ptr<lib::Publisher>> Job::acquire() {
  lib::AcquireRequest request;
  request.model = &model_.identity();
  request.tokens = ids_;
  request.profile = profile_;
  request.may_produce = true;
  request.wait = true;
  request.timeout_ms = heartbeat_ms();
  request.job = job_;
  request.extends = extends_;
  while (true) {
    Result<lib::Acquired> acquired = lib::acquire(session_, request);
    if (acquired.is_ok()) return std::move(acquired->publisher);
    // Somebody else is computing it: wait, and say that we live.
    if (acquired.status().code() != POLYKV_ERR_TIMEOUT) return acquired.status();
    POLYKV_RETURN_IF_ERROR(keep_alive(POLYKV_INGEST_QUEUED, 0));
  }
}

Status Job::check_memory(const DocumentSize& size) const {
  POLYKV_RETURN_IF_ERROR(check_host_memory(computer_.host_memory(size)));
  return computer_.check_other_memory(size);
}

Status Job::check_host_memory(const MemoryEstimate& estimate) const {
  const uint64_t there = computer_.has_weights() ? estimate.weights_bytes : 0;
  const uint64_t needed = estimate.total_bytes() - there;
  POLYKV_ASSIGN_OR_RETURN(uint64_t free, free_memory_.available_bytes());
  const char* whose = "this machine has";
  if (control_group_free_bytes_ != 0 && control_group_free_bytes_ < free) {
    free = control_group_free_bytes_;
    whose = "polykvd's control group has";
  }
  if (limits_.memory_bytes != 0) {
    const uint64_t allowed = limits_.memory_bytes > there ? limits_.memory_bytes - there : 0;
    if (allowed < free) {
      free = allowed;
      whose = "polykvd allows its worker";
    }
  }
  if (needed <= free) return Status::ok();
  return {POLYKV_ERR_BUDGET,
          format("ingest: prefilling %zu tokens needs %s more (weights %s, cache %s, scratch %s), "
                 "but %s %s; free memory, raise the limit or cut the document",
                 ids_.size(), mebibytes(needed).c_str(),
                 mebibytes(estimate.weights_bytes - there).c_str(),
                 mebibytes(estimate.kv_cache_bytes).c_str(),
                 mebibytes(estimate.scratch_bytes).c_str(), whose, mebibytes(free).c_str())};
}

Status Job::load_weights(lib::Publisher& publisher) {
  if (computer_.has_weights()) return Status::ok();
  POLYKV_RETURN_IF_ERROR(keep_alive(POLYKV_INGEST_LOADING, 0));
  Status lost;
  const auto progress = [&, last = lib::Clock::now()](uint64_t, uint64_t) mutable {
    const auto now = lib::Clock::now();
    if (now - last < std::chrono::milliseconds(heartbeat_ms())) return true;
    last = now;
    lost = keep_alive(POLYKV_INGEST_LOADING, 0);
    if (lost.is_ok()) lost = publisher.progress(0);
    return lost.is_ok();
  };
  Result<Weights> loaded = model_.load_weights(limits_.thread_count, progress);
  POLYKV_RETURN_IF_ERROR(lost);
  if (!loaded.is_ok()) return loaded.status();
  Status taken = computer_.take_weights(std::move(*loaded), progress);
  POLYKV_RETURN_IF_ERROR(lost);
  return taken;
}

/// What other documents, or a producer before us, sealed of this one: the new tokens attend to what
/// it decodes to, as every agent does.
Status Job::take_prefix(lib::Publisher& publisher, Computation& computation) {
  POLYKV_ASSIGN_OR_RETURN(const std::unique_ptr<lib::Lease> sealed, publisher.acquire_sealed());
  const auto token_count = static_cast<uint32_t>(publisher.next_token());
  for (uint32_t layer = 0; layer < sealed->layer_count(); ++layer) {
    POLYKV_RETURN_IF_ERROR(computation.take_layer(*sealed, layer, token_count));
    POLYKV_RETURN_IF_ERROR(keep_alive(POLYKV_INGEST_PREFILLING, token_count));
  }
  computation.set_token_count(token_count);
  return sealed->release();
}

Status Job::prefill(lib::Publisher& publisher) {
  const auto token_count = static_cast<uint32_t>(ids_.size());
  POLYKV_ASSIGN_OR_RETURN(const std::unique_ptr<Computation> computation,
                          computer_.begin(token_count));
  POLYKV_RETURN_IF_ERROR(
      keep_alive(POLYKV_INGEST_PREFILLING, recompute_prefix_ ? 0 : publisher.next_token()));
  if (publisher.next_token() > 0) {
    if (recompute_prefix_) {
      publisher.set_prefix_treatment(PrefixTreatment::recomputed);
    } else {
      POLYKV_RETURN_IF_ERROR(take_prefix(publisher, *computation));
    }
  }
  const uint32_t taken = computation->token_count();
  uint64_t position = taken;
  Status lost;
  lib::Clock::time_point last_sign = lib::Clock::now();
  const auto show_life = [&] {
    last_sign = lib::Clock::now();
    lost = keep_alive(POLYKV_INGEST_PREFILLING, position);
    if (lost.is_ok()) lost = publisher.progress(position);
    return lost.is_ok();
  };
  ForwardOptions options;
  options.chunk_tokens = kPrefillChunkTokens;
  options.progress = [&](uint32_t tokens_done, uint32_t) {
    position = tokens_done;
    result_.prefilled_tokens = position - taken;
    return show_life();
  };
  // A chunk may take long on a busy machine.
  options.between_layers = [&] {
    const auto silent = lib::Clock::now() - last_sign;
    return silent < std::chrono::milliseconds(heartbeat_ms()) || show_life();
  };
  while (computation->token_count() < token_count) {
    const uint64_t done = computation->token_count();
    const uint64_t end = segment_end(publisher);
    const auto next = std::span<const uint32_t>(ids_).subspan(done, end - done);
    const Status computed = computation->forward(next, options);
    POLYKV_RETURN_IF_ERROR(lost);
    POLYKV_RETURN_IF_ERROR(computed);
    POLYKV_RETURN_IF_ERROR(computation->publish(publisher, end - publisher.next_token()));
  }
  return publisher.finish();
}

uint64_t Job::segment_end(const lib::Publisher& publisher) const {
  if (is_single_segment(profile_)) return ids_.size();
  return std::min<uint64_t>(publisher.next_token() + lib::kSegmentTokens, ids_.size());
}

Status Job::report(polykv_ingest_phase phase, uint64_t tokens_done) {
  flatbuffers::FlatBufferBuilder builder;
  const auto body =
      wire::CreateJobProgress(builder, job_, static_cast<uint32_t>(phase), tokens_done, ids_.size(),
                              memory_bytes_, result_.prefilled_tokens);
  Status sent = session_->send(builder, body);
  if (!sent.is_ok()) session_status_ = sent;
  return sent;
}

Status Job::keep_alive(polykv_ingest_phase phase, uint64_t tokens_done) {
  POLYKV_RETURN_IF_ERROR(report(phase, tokens_done));
  if (is_cancelled()) return {POLYKV_ERR_CANCELLED, "ingest: cancelled"};
  return session_status_;
}

bool Job::is_cancelled() {
  while (!cancelled_) {
    const Result<lib::Message> event = session_->next_event(lib::deadline_after_ms(1));
    if (!event.is_ok()) {
      if (event.status().code() != POLYKV_ERR_TIMEOUT) session_status_ = event.status();
      return false;
    }
    const auto* cancel = event->as<wire::JobCancel>();
    if (cancel == nullptr) {
      session_status_ = lib::unexpected_packet(*event, wire::Body::JobCancel);
      return false;
    }
    cancelled_ = cancel->job() == job_;
  }
  return true;
}

int64_t Job::heartbeat_ms() const {
  // A quarter of the time after which polykvd takes a silent worker for dead, at most a second.
  const uint64_t stall_ms = session_->stall_deadline_ms();
  return static_cast<int64_t>(std::clamp<uint64_t>(stall_ms / 4, 10, 1000));
}

}  // namespace polykv
