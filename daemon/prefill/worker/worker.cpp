#include "daemon/prefill/worker/worker.h"

#include <memory>
#include <new>
#include <optional>
#include <string>

#include "common/wire.h"
#include "daemon/prefill/transformer/transformer.h"
#include "daemon/prefill/worker/free_memory.h"
#include "daemon/prefill/worker/gpu_start.h"
#include "daemon/prefill/worker/job.h"
#include "daemon/prefill/worker/prefill_model.h"
#include "daemon/prefill/worker/sandbox.h"
#include "daemon/prefill/worker/warm_up.h"
#include "libclient/session.h"

namespace polykv {

namespace {

constexpr int64_t kGreetingDeadlineMs = 60'000;
constexpr uint32_t kMaxThreads = 1024;

/// Whether the connection is of no use any more, so that the worker must end.
bool ends_worker(const Status& status) {
  return status.code() == POLYKV_ERR_DAEMON_GONE || status.code() == POLYKV_ERR_PROTOCOL;
}

class Worker {
 public:
  explicit Worker(std::shared_ptr<lib::Session> session) : session_(std::move(session)) {}

  Status run() {
    POLYKV_RETURN_IF_ERROR(lock_down());
    Result<PrefillModel> model = open_model();
    if (!model.is_ok()) {
      report_failure(model.status());
      return model.status();
    }
    POLYKV_RETURN_IF_ERROR(report_ready(*model));
    return serve(*model);
  }

 private:
  /// From the settings on, up to where the model may be looked at.
  Status lock_down() {
    POLYKV_ASSIGN_OR_RETURN(settings_message_,
                            session_->next_event(lib::deadline_after_ms(kGreetingDeadlineMs)));
    settings_ = settings_message_->as<wire::WorkerStart>();
    if (settings_ == nullptr)
      return lib::unexpected_packet(*settings_message_, wire::Body::WorkerStart);
    limits_.thread_count = std::clamp<uint32_t>(settings_->thread_count(), 1, kMaxThreads);
    limits_.memory_bytes = settings_->memory_limit_bytes();
    if (settings_->text_limit_bytes() != 0) limits_.text_bytes = settings_->text_limit_bytes();
    POLYKV_ASSIGN_OR_RETURN(FreeMemory free_memory, FreeMemory::open());
    free_memory_ = std::make_unique<FreeMemory>(std::move(free_memory));
    warm_up(limits_.thread_count);
    const ComputerSettings wanted = computer_settings();
    Result<ChosenComputer> chosen = choose_computer(wanted);
    if (!chosen.is_ok()) {
      report_failure(chosen.status());
      return chosen.status();
    }
    Status locked =
        enter_sandbox({.memory_bytes = limits_.memory_bytes, .uses_gpu = chosen->gpu.has_value()});
    if (locked.is_ok()) locked = look_from_inside(wanted, *chosen);
    if (!locked.is_ok()) report_failure(locked);
    computer_ = std::move(chosen->computer);
    return locked;
  }

  ComputerSettings computer_settings() const {
    ComputerSettings settings;
    settings.device = static_cast<WorkerDevice>(settings_->device());
    settings.cuda_library = text_or_empty(settings_->cuda_library());
    settings.gpu_uuid = text_or_empty(settings_->gpu_uuid());
    settings.documents_on_gpu = settings_->documents_on_gpu();
    settings.thread_count = limits_.thread_count;
    settings.host_description = blas_info().description;  // looks at files
    return settings;
  }

  Result<PrefillModel> open_model() {
    std::optional<Digest> known;
    if (settings_->has_known_fingerprint() && settings_->known_fingerprint() != nullptr)
      known = from_wire(*settings_->known_fingerprint());
    std::string name(text_or_empty(settings_->model_name()));
    try {
      return PrefillModel::open(std::move(settings_message_->fds[0]), std::move(name), known);
    } catch (const std::bad_alloc&) {
      return {POLYKV_ERR_NO_MEMORY, "read the model: out of memory; raise worker.memory_limit"};
    }
  }

  void report_failure(const Status& status) {
    flatbuffers::FlatBufferBuilder builder;
    const auto body = wire::CreateWorkerFailedDirect(builder, static_cast<uint32_t>(status.code()),
                                                     status.message().c_str());
    static_cast<void>(session_->send(builder, body).is_ok());
  }

  Status report_ready(const PrefillModel& model) {
    flatbuffers::FlatBufferBuilder builder;
    const auto identity = to_wire(builder, model.identity());
    const auto computer = builder.CreateString(computer_->description());
    return session_->send(builder, wire::CreateWorkerReady(builder, identity, computer));
  }

  Status serve(PrefillModel& model) {
    while (true) {
      Result<lib::Message> event = session_->next_event(lib::kNoDeadline);
      if (!event.is_ok()) {
        const bool stopped = event.status().code() == POLYKV_ERR_DAEMON_GONE;
        return stopped ? Status::ok() : event.status();
      }
      if (event->as<wire::JobCancel>() != nullptr) continue;  // its job is over already
      const auto* start = event->as<wire::JobStart>();
      if (start == nullptr) return lib::unexpected_packet(*event, wire::Body::JobStart);
      const JobResult result = run_job(model, *start, std::move(event->fds));
      if (ends_worker(result.status)) return result.status;
      POLYKV_RETURN_IF_ERROR(report_done(start->job(), result));
      // Nothing on the GPU works any more in this process; the next one may find it well.
      if (result.status.code() == POLYKV_ERR_DEVICE_LOST) return result.status;
    }
  }

  JobResult run_job(PrefillModel& model, const wire::JobStart& start, std::vector<UniqueFd> fds) {
    try {
      return Job(session_, model, *computer_, *free_memory_, limits_, start, std::move(fds)).run();
    } catch (const std::bad_alloc&) {
      return {{POLYKV_ERR_NO_MEMORY, "ingest: out of memory; raise worker.memory_limit"}, {}, 0};
    }
  }

  Status report_done(uint64_t job, const JobResult& result) {
    flatbuffers::FlatBufferBuilder builder;
    const wire::Digest digest = to_wire(result.digest);
    const auto body = wire::CreateJobDoneDirect(
        builder, job, static_cast<uint32_t>(result.status.code()), result.status.message().c_str(),
        &digest, result.prefilled_tokens);
    return session_->send(builder, body);
  }

  std::shared_ptr<lib::Session> session_;
  std::optional<lib::Message> settings_message_;
  const wire::WorkerStart* settings_ = nullptr;  // within settings_message_
  JobLimits limits_;
  std::unique_ptr<FreeMemory> free_memory_;
  std::unique_ptr<Computer> computer_;
};

}  // namespace

Status run_worker(UniqueFd socket) {
  POLYKV_ASSIGN_OR_RETURN(std::shared_ptr<lib::Session> session,
                          lib::Session::adopt(std::move(socket), "polykv-prefill",
                                              lib::deadline_after_ms(kGreetingDeadlineMs), true));
  return Worker(std::move(session)).run();
}

}  // namespace polykv
