// Stands in for polykv-prefill where its supervision is tested: speaks the protocol, computes
// nothing, needs no torch. What it does is said by its inputs:
//
//   model file   "fail ..."   WorkerFailed (MODEL_FORMAT) with the rest as its message
//                "die ..."    exits with status 7 before it is ready
//                otherwise    a model of two small layers; the bytes are its fingerprint
//   text         its bytes are the token ids, and its first word says how the job goes:
//                "crash"      SIGKILL to itself once it has a ticket
//                "stall"      SIGSTOP to itself once it has a ticket
//                "wait"       reports progress until it is cancelled
//                "refuse"     ends with BUDGET
//                otherwise    publishes it, two tokens a "chunk", 4,096 a segment
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "common/digest.h"
#include "daemon/prefill/worker/text_input.h"
#include "libclient/acquire.h"
#include "libclient/session.h"
#include "polykv/polykv.h"

namespace polykv::test {

namespace {

constexpr int64_t kDeadlineMs = 60'000;

class FakeWorker {
 public:
  explicit FakeWorker(std::shared_ptr<lib::Session> session) : session_(std::move(session)) {}

  Status run() {
    POLYKV_ASSIGN_OR_RETURN(const lib::Message settings, next_event());
    const auto* start = settings.as<wire::WorkerStart>();
    if (start == nullptr) return lib::unexpected_packet(settings, wire::Body::WorkerStart);
    POLYKV_ASSIGN_OR_RETURN(const std::string file, read_text(settings.fds[0].get(), "model", {}));
    if (file.starts_with("die ")) ::_exit(7);
    if (file.starts_with("fail ")) return report_failure(file.substr(5));
    identity_.name = "fake";
    identity_.fingerprint = start->has_known_fingerprint() ? from_wire(*start->known_fingerprint())
                                                           : Hasher().update(file).finish();
    identity_.rope = {RopeKind::half_rotation, RopeScaling::none, 16, 10000.0, 1.0, 0};
    identity_.layers = {{2, 16, 16, 0}, {1, 32, 16, 0}};
    flatbuffers::FlatBufferBuilder builder;
    const auto model = to_wire(builder, identity_);
    const auto blas = builder.CreateString("none");
    POLYKV_RETURN_IF_ERROR(session_->send(builder, wire::CreateWorkerReady(builder, model, blas)));
    while (true) {
      POLYKV_ASSIGN_OR_RETURN(const lib::Message event, next_event());
      if (event.as<wire::JobCancel>() != nullptr) continue;
      const auto* job = event.as<wire::JobStart>();
      if (job == nullptr) return lib::unexpected_packet(event, wire::Body::JobStart);
      job_ = job->job();
      prefilled_tokens_ = 0;
      const Status done = run_job(*job, event.fds[0].get());
      POLYKV_RETURN_IF_ERROR(report_done(done));
    }
  }

 private:
  Result<lib::Message> next_event() { return session_->next_event(lib::kNoDeadline); }

  Status report_failure(const std::string& message) {
    flatbuffers::FlatBufferBuilder builder;
    return session_->send(
        builder, wire::CreateWorkerFailedDirect(builder, POLYKV_ERR_MODEL_FORMAT, message.c_str()));
  }

  Status report_progress(polykv_ingest_phase phase, uint64_t tokens_done) {
    flatbuffers::FlatBufferBuilder builder;
    return session_->send(builder,
                          wire::CreateJobProgress(builder, job_, phase, tokens_done, ids_.size(),
                                                  1000 + ids_.size(), prefilled_tokens_));
  }

  Status report_done(const Status& status) {
    flatbuffers::FlatBufferBuilder builder;
    const wire::Digest digest = to_wire(digest_);
    return session_->send(
        builder, wire::CreateJobDoneDirect(builder, job_, static_cast<uint32_t>(status.code()),
                                           status.message().c_str(), &digest, prefilled_tokens_));
  }

  Status run_job(const wire::JobStart& job, int text_fd) {
    POLYKV_ASSIGN_OR_RETURN(const std::string text, read_text(text_fd, "text", {}));
    ids_.assign(text.begin(), text.end());
    digest_ = ids_.empty() ? Digest{} : chain_digests(chain_root(identity_), ids_).back();
    POLYKV_RETURN_IF_ERROR(report_progress(POLYKV_INGEST_TOKENIZING, 0));
    if (ids_.empty()) return {POLYKV_ERR_EMPTY_DOCUMENT, "the document has no tokens"};
    if (text.starts_with("refuse")) return {POLYKV_ERR_BUDGET, "the fake worker refuses"};
    lib::AcquireRequest request;
    request.model = &identity_;
    request.tokens = ids_;
    request.profile = static_cast<Profile>(job.profile());
    request.may_produce = true;
    request.wait = true;
    request.timeout_ms = kDeadlineMs;
    request.job = job_;
    POLYKV_ASSIGN_OR_RETURN(const lib::Acquired acquired, lib::acquire(session_, request));
    if (acquired.publisher == nullptr) return Status::ok();
    const Status published = publish(text, *acquired.publisher);
    if (!published.is_ok()) acquired.publisher->abort();
    return published;
  }

  Status publish(const std::string& text, lib::Publisher& publisher) {
    POLYKV_RETURN_IF_ERROR(report_progress(POLYKV_INGEST_PREFILLING, 0));
    if (text.starts_with("crash")) ::raise(SIGKILL);
    if (text.starts_with("stall")) ::raise(SIGSTOP);
    while (text.starts_with("wait")) {
      POLYKV_RETURN_IF_ERROR(publisher.progress(0));
      POLYKV_RETURN_IF_ERROR(report_progress(POLYKV_INGEST_PREFILLING, 0));
      const Result<lib::Message> event = session_->next_event(lib::deadline_after_ms(5));
      if (event.is_ok()) return {POLYKV_ERR_CANCELLED, "ingest: cancelled"};
      if (event.status().code() != POLYKV_ERR_TIMEOUT) return event.status();
    }
    while (publisher.next_token() < ids_.size()) {
      POLYKV_RETURN_IF_ERROR(publish_segment(publisher));
    }
    return publisher.finish();
  }

  Status publish_segment(lib::Publisher& publisher) {
    POLYKV_ASSIGN_OR_RETURN(const auto segment, publisher.begin_segment());
    const uint64_t end = segment->first_token() + segment->token_count();
    while (prefilled_tokens_ < end) {
      prefilled_tokens_ = std::min(prefilled_tokens_ + 2, end);
      POLYKV_RETURN_IF_ERROR(publisher.progress(prefilled_tokens_));
      POLYKV_RETURN_IF_ERROR(report_progress(POLYKV_INGEST_PREFILLING, prefilled_tokens_));
    }
    for (uint32_t layer = 0; layer < identity_.layers.size(); ++layer) {
      const LayerGeometry& geometry = identity_.layers[layer];
      const std::vector<float> k = values(segment->first_token(), segment->token_count(),
                                          geometry.kv_head_count * geometry.k_head_dim);
      const std::vector<float> v = values(segment->first_token(), segment->token_count(),
                                          geometry.kv_head_count * geometry.v_head_dim);
      const auto strides = [&](uint32_t dim) {
        return Strides{dim, int64_t{geometry.kv_head_count} * dim, 1};
      };
      const KvSource source{Dtype::f32, k.data(), strides(geometry.k_head_dim), v.data(),
                            strides(geometry.v_head_dim)};
      POLYKV_RETURN_IF_ERROR(segment->encode_layer(layer, source));
    }
    return segment->commit();
  }

  /// [token, width]: a token's values are all its id.
  std::vector<float> values(uint64_t first, uint64_t count, uint32_t width) const {
    std::vector<float> result;
    for (uint64_t i = first; i < first + count; ++i)
      result.insert(result.end(), width, static_cast<float>(ids_[i]));
    return result;
  }

  std::shared_ptr<lib::Session> session_;
  ModelIdentity identity_;
  uint64_t job_ = 0;
  std::vector<uint32_t> ids_;
  Digest digest_{};
  uint64_t prefilled_tokens_ = 0;
};

}  // namespace

}  // namespace polykv::test

int main() {
  using namespace polykv;
  auto session = lib::Session::adopt(UniqueFd(3), "fake worker",
                                     lib::deadline_after_ms(test::kDeadlineMs), true);
  const Status ended = session.is_ok() ? test::FakeWorker(*session).run() : session.status();
  const bool is_stopped = ended.is_ok() || ended.code() == POLYKV_ERR_DAEMON_GONE;
  if (!is_stopped) std::fprintf(stderr, "fake worker: %s\n", ended.message().c_str());
  return is_stopped ? 0 : static_cast<int>(ended.code());
}
