#include "daemon/workers.h"

#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "daemon/log.h"
#include "polykv/polykv.h"

namespace polykv::daemon {

namespace {

constexpr int64_t kExitDeadlineMs = 5'000;  // for a worker that was told to go

std::string quoted_name(const ModelFile& model) {
  return "'" + model.name + "'";
}

}  // namespace

Workers::Workers(EventLoop& loop, Server& server, Counters& counters, WorkersConfig config)
    : loop_(loop), server_(server), counters_(counters), config_(std::move(config)) {}

Workers::~Workers() {
  stop();
}

void Workers::stop() {
  serving_.clear();
  for (auto& [id, worker] : workers_) {
    loop_.cancel_timer(worker->timer);
    loop_.unwatch(worker->process.pidfd());
  }
  workers_.clear();
}

Result<JobId> Workers::submit(const ModelFile& model, JobSpec spec, JobCallbacks callbacks) {
  if (!serving_.contains(model.key)) static_cast<void>(known_model(model.key));
  POLYKV_ASSIGN_OR_RETURN(Worker* const worker, worker_for(model));
  if (worker->queue.size() >= config_.jobs_per_worker_max) {
    return {POLYKV_ERR_LIMIT,
            format("ingest with model %s: %zu documents wait for it already; try again later",
                   quoted_name(model).c_str(), worker->queue.size())};
  }
  auto job = std::make_unique<Job>();
  job->id = next_job_++;
  job->spec = std::move(spec);
  job->callbacks = std::move(callbacks);
  const JobId id = job->id;
  const bool is_starting = worker->state == State::starting;
  // Progress and the job's start come after the caller knows its number.
  loop_.defer([this, is_starting, id, worker_id = worker->id] {
    const auto found = workers_.find(worker_id);
    if (found == workers_.end()) return;
    for (const auto& queued : found->second->queue) {
      if (queued->id != id) continue;
      queued->callbacks.on_progress(
          {is_starting ? POLYKV_INGEST_LOADING : POLYKV_INGEST_QUEUED, 0, 0, 0});
      break;
    }
    if (const auto still = workers_.find(worker_id); still != workers_.end())
      start_next_job(*still->second);
  });
  worker->queue.push_back(std::move(job));
  return id;
}

void Workers::cancel(JobId id) {
  for (auto& [worker_id, worker] : workers_) {
    if (worker->running != nullptr && worker->running->id == id) {
      if (std::exchange(worker->running->is_cancelled, true)) return;
      flatbuffers::FlatBufferBuilder builder;
      send_packet(server_, worker->session, builder, 0, wire::CreateJobCancel(builder, id));
      return;
    }
    auto& queue = worker->queue;
    const auto found =
        std::find_if(queue.begin(), queue.end(), [id](const auto& job) { return job->id == id; });
    if (found == queue.end()) continue;
    const std::unique_ptr<Job> job = std::move(*found);
    queue.erase(found);
    job->callbacks.on_end({POLYKV_ERR_CANCELLED, "ingest: cancelled"}, {});
    return;
  }
}

void Workers::identify(const ModelFile& model, OnIdentified on_identified) {
  if (const ModelIdentity* known = known_model(model.key)) return on_identified(*known);
  const Result<Worker*> worker = worker_for(model);
  if (!worker.is_ok()) return on_identified(worker.status());
  if ((*worker)->identity) return on_identified(*(*worker)->identity);
  (*worker)->identify_waiters.push_back(std::move(on_identified));
}

// ---- starting ----------------------------------------------------------------------------------

Result<Workers::Worker*> Workers::worker_for(const ModelFile& model) {
  const auto serving = serving_.find(model.key);
  if (serving != serving_.end()) return workers_.at(serving->second).get();
  POLYKV_RETURN_IF_ERROR(make_room());
  return start_worker(model);
}

/// Each worker holds a model's weights: an idle one goes before a new one comes.
Status Workers::make_room() {
  if (workers_.size() < config_.worker_count_max) return Status::ok();
  for (auto& [id, worker] : workers_) {
    const bool is_idle =
        worker->state == State::ready && worker->running == nullptr && worker->queue.empty();
    if (!is_idle) continue;
    end_worker(*worker, Status::ok());
    return Status::ok();
  }
  return {POLYKV_ERR_LIMIT,
          format("ingest: %zu polykv-prefill processes are at work already; try again later",
                 workers_.size())};
}

Result<Workers::Worker*> Workers::start_worker(const ModelFile& model) {
  POLYKV_ASSIGN_OR_RETURN(const std::string program, find_worker_program(config_.program));
  POLYKV_ASSIGN_OR_RETURN(WorkerProcess::Started started, WorkerProcess::start(program));
  UniqueFd pidfd(::fcntl(started.process.pidfd(), F_DUPFD_CLOEXEC, 0));
  if (!pidfd) return system_error("watch polykv-prefill", errno, "see RLIMIT_NOFILE");
  auto owned = std::make_unique<Worker>();
  Worker& worker = *owned;
  worker.id = next_worker_++;
  worker.model = model;
  worker.process = std::move(started.process);
  POLYKV_RETURN_IF_ERROR(loop_.watch(worker.process.pidfd(), EPOLLIN,
                                     [this, id = worker.id](uint32_t) { on_process_end(id); }));
  Result<SessionId> session =
      server_.adopt_worker(std::move(started.socket), worker.process.pid(), std::move(pidfd));
  if (!session.is_ok()) {
    loop_.unwatch(worker.process.pidfd());
    return session.status();
  }
  worker.session = *session;
  log_info("started polykv-prefill, pid %d, for uid %u with model %s", worker.process.pid(),
           model.key.uid, quoted_name(model).c_str());
  workers_.emplace(worker.id, std::move(owned));
  serving_.emplace(model.key, worker.id);
  arm_timer(worker);
  return &worker;
}

void Workers::on_session_ready(SessionId session) {
  if (Worker* worker = find_session(session)) send_settings(*worker);
}

void Workers::send_settings(Worker& worker) {
  const ModelIdentity* known = fingerprints_.find(worker.model.key);
  flatbuffers::FlatBufferBuilder builder;
  const auto name = builder.CreateString(worker.model.name);
  wire::Digest fingerprint{};
  if (known != nullptr) fingerprint = to_wire(known->fingerprint);
  const auto library = builder.CreateString(config_.cuda_library);
  const auto gpu = builder.CreateString(config_.gpu_uuid);
  const auto body = wire::CreateWorkerStart(
      builder, name, known != nullptr, &fingerprint, config_.thread_count,
      config_.memory_limit_bytes, config_.text_limit_bytes, static_cast<uint8_t>(config_.device),
      library, gpu, config_.documents_on_gpu);
  send_packet(server_, worker.session, builder, 0, body, {worker.model.file});
}

// ---- jobs --------------------------------------------------------------------------------------

void Workers::start_next_job(Worker& worker) {
  if (worker.state != State::ready || worker.running != nullptr) return;
  if (!worker.queue.empty()) {
    worker.running = std::move(worker.queue.front());
    worker.queue.pop_front();
    send_job(worker);
  }
  arm_timer(worker);
}

void Workers::send_job(const Worker& worker) {
  const Job& job = *worker.running;
  flatbuffers::FlatBufferBuilder builder;
  const wire::Digest extends = to_wire(job.spec.extends.value_or(Digest{}));
  // With each job: a worker cannot read its control groups, and what they have left changes.
  const std::optional<uint64_t> free = config_.control_group_free_bytes();
  const uint64_t free_bytes = free ? std::max<uint64_t>(*free, 1) : 0;
  const auto body = wire::CreateJobStart(
      builder, job.id, job.spec.has_text_fd, job.spec.token_count, job.spec.has_before_fd,
      job.spec.profile, job.spec.add_bos, job.spec.parse_special, job.spec.chat_head,
      job.spec.extends ? &extends : nullptr, job.spec.recompute_prefix, free_bytes);
  send_packet(server_, worker.session, builder, 0, body, job.spec.fds);
}

void Workers::on_packet(SessionId session, const wire::Packet& packet) {
  Worker* worker = find_session(session);
  if (worker == nullptr || worker->state == State::ending) return;
  if (const auto* ready = packet.body_as_WorkerReady()) {
    on_ready(*worker, *ready);
  } else if (const auto* failed = packet.body_as_WorkerFailed()) {
    const auto code =
        failed->code() == 0 ? POLYKV_ERR_WORKER : static_cast<polykv_status>(failed->code());
    end_worker(*worker, {code, std::string(text_or_empty(failed->message()))});
  } else if (const auto* progress = packet.body_as_JobProgress()) {
    on_progress(*worker, *progress);
  } else if (const auto* done = packet.body_as_JobDone()) {
    on_done(*worker, *done);
  }
}

void Workers::on_ready(Worker& worker, const wire::WorkerReady& ready) {
  const auto bad = [&](const std::string& why) {
    end_worker(worker, {POLYKV_ERR_WORKER, "read polykv-prefill's word on its model: " + why});
  };
  if (worker.state != State::starting || ready.model() == nullptr) return bad("it makes no sense");
  Result<ModelIdentity> identity = from_wire(*ready.model());
  if (!identity.is_ok()) return bad(identity.status().message());
  // What the worker read is only known to be this state of the file if the file still has it.
  const Result<FileIdentity> file = file_identity(worker.model.file->get());
  if (file.is_ok() && *file == worker.model.key.file)
    fingerprints_.insert(worker.model.key, *identity);
  worker.identity = std::move(*identity);
  worker.state = State::ready;
  log_info("polykv-prefill, pid %d, is ready with model %s; it computes with %s",
           worker.process.pid(), quoted_name(worker.model).c_str(),
           std::string(text_or_empty(ready.computer())).c_str());
  const auto waiters = std::exchange(worker.identify_waiters, {});
  const Result<ModelIdentity> told = *worker.identity;
  start_next_job(worker);
  for (const OnIdentified& waiter : waiters) waiter(told);
}

void Workers::on_progress(Worker& worker, const wire::JobProgress& progress) {
  if (worker.running == nullptr || progress.job() != worker.running->id) return;
  arm_timer(worker);
  count_prefilled(*worker.running, progress.prefilled_tokens());
  worker.running->callbacks.on_progress(
      {progress.phase(), progress.tokens_done(), progress.token_count(), progress.memory_bytes()});
}

void Workers::on_done(Worker& worker, const wire::JobDone& done) {
  if (worker.running == nullptr || done.job() != worker.running->id) return;
  const std::unique_ptr<Job> job = std::move(worker.running);
  count_prefilled(*job, done.prefilled_tokens());
  start_next_job(worker);
  const auto code = static_cast<polykv_status>(done.code());
  if (code == POLYKV_OK && done.digest() == nullptr) {
    job->callbacks.on_end({POLYKV_ERR_WORKER, "ingest: polykv-prefill does not say what it made"},
                          {});
  } else if (code == POLYKV_OK) {
    job->callbacks.on_end(Status::ok(), from_wire(*done.digest()));
  } else {
    job->callbacks.on_end({code, std::string(text_or_empty(done.message()))}, {});
  }
}

void Workers::count_prefilled(Job& job, uint64_t tokens) {
  if (tokens <= job.prefilled_tokens) return;
  counters_.tokens_prefilled_total += tokens - job.prefilled_tokens;
  job.prefilled_tokens = tokens;
}

JobId Workers::running_job(SessionId session) const {
  for (const auto& [id, worker] : workers_) {
    if (worker->session == session)
      return worker->running == nullptr ? JobId{0} : worker->running->id;
  }
  return 0;
}

// ---- ending ------------------------------------------------------------------------------------

void Workers::arm_timer(Worker& worker) {
  loop_.cancel_timer(worker.timer);
  int64_t delay_ms = config_.idle_ms;
  if (worker.state == State::ending) {
    delay_ms = kExitDeadlineMs;
  } else if (worker.state == State::starting) {
    delay_ms = config_.start_deadline_ms;
  } else if (worker.running != nullptr) {
    delay_ms = config_.stall_deadline_ms;
  }
  worker.timer = loop_.add_timer(delay_ms, [this, id = worker.id] { on_timer(id); });
}

void Workers::on_timer(WorkerId id) {
  const auto found = workers_.find(id);
  if (found == workers_.end()) return;
  Worker& worker = *found->second;
  worker.timer = 0;
  if (worker.state == State::ending) {
    worker.process.kill();
  } else if (worker.state == State::starting) {
    end_worker(worker,
               {POLYKV_ERR_WORKER, format("ingest: polykv-prefill did not get ready with "
                                          "model %s within %lld ms; see polykvd's log, or raise "
                                          "worker.start_deadline",
                                          quoted_name(worker.model).c_str(),
                                          static_cast<long long>(config_.start_deadline_ms))});
  } else if (worker.running != nullptr) {
    end_worker(worker,
               {POLYKV_ERR_PRODUCER_LOST,
                format("ingest: polykv-prefill, pid %d, said nothing for %lld ms and was stopped; "
                       "try again",
                       worker.process.pid(), static_cast<long long>(config_.stall_deadline_ms))});
  } else {
    log_info("polykv-prefill, pid %d, is idle and goes", worker.process.pid());
    end_worker(worker, Status::ok());
  }
}

void Workers::end_worker(Worker& worker, Status failure) {
  if (worker.state == State::ending) return;
  worker.state = State::ending;
  serving_.erase(worker.model.key);
  const bool is_idle_stop = failure.is_ok();
  worker.failure = std::move(failure);
  if (!is_idle_stop) {
    log_warning("polykv-prefill, pid %d, has to end: %s", worker.process.pid(),
                worker.failure.message().c_str());
    worker.process.kill();
  }
  // Its tickets end with its session.
  server_.close(worker.session);
  arm_timer(worker);
  if (is_idle_stop) return;
  // Those behind the running job wait for the process' end, see on_process_end().
  if (worker.identity) return fail_running(worker, worker.failure);
  fail_everything(worker, worker.failure);
}

void Workers::fail_running(Worker& worker, const Status& status) {
  const std::unique_ptr<Job> running = std::move(worker.running);
  // Callbacks may end anything. NOLINTNEXTLINE(performance-unnecessary-copy-initialization)
  const Status reason = status;
  if (running != nullptr) running->callbacks.on_end(reason, {});
}

void Workers::fail_everything(Worker& worker, const Status& status) {
  const auto queue = std::exchange(worker.queue, {});
  const auto waiters = std::exchange(worker.identify_waiters, {});
  // Callbacks may end anything. NOLINTNEXTLINE(performance-unnecessary-copy-initialization)
  const Status reason = status;
  fail_running(worker, reason);
  for (const auto& job : queue) job->callbacks.on_end(reason, {});
  for (const OnIdentified& waiter : waiters) waiter(reason);
}

void Workers::hand_over(Worker& worker) {
  if (worker.queue.empty()) return;
  const Result<Worker*> next = worker_for(worker.model);
  if (!next.is_ok()) return fail_everything(worker, next.status());
  // In front: they came before what its successor was given since.
  auto& queue = (*next)->queue;
  std::move(worker.queue.rbegin(), worker.queue.rend(), std::front_inserter(queue));
  worker.queue.clear();
  start_next_job(**next);
}

void Workers::on_session_end(SessionId session) {
  Worker* worker = find_session(session);
  if (worker == nullptr || worker->state == State::ending) return;
  // How its process ends says why; it gets a moment for that.
  worker->state = State::ending;
  serving_.erase(worker->model.key);
  arm_timer(*worker);
}

void Workers::on_process_end(WorkerId id) {
  const auto found = workers_.find(id);
  if (found == workers_.end()) return;
  const std::unique_ptr<Worker> worker = std::move(found->second);
  workers_.erase(found);
  loop_.cancel_timer(worker->timer);
  loop_.unwatch(worker->process.pidfd());
  const pid_t pid = worker->process.pid();
  const std::string how = worker->process.reap();
  log_info("polykv-prefill, pid %d, %s", pid, how.c_str());
  if (worker->state != State::ending) {
    serving_.erase(worker->model.key);
    server_.close(worker->session);
  }
  const Status reason = {
      POLYKV_ERR_WORKER,
      format("ingest: polykv-prefill, pid %d, %s; polykvd goes on, try again and see its log", pid,
             how.c_str())};
  // A worker that got ready always runs the first of its jobs, so each death takes one: handing the
  // rest over comes to an end.
  if (!worker->identity) return fail_everything(*worker, reason);
  fail_running(*worker, reason);
  hand_over(*worker);
}

/// Counts: one hit or miss for each request that had to ask.
const ModelIdentity* Workers::known_model(const ModelKey& key) {
  const ModelIdentity* known = fingerprints_.find(key);
  ++(known != nullptr ? counters_.fingerprint_cache_hits_total
                      : counters_.fingerprint_cache_misses_total);
  return known;
}

Workers::Worker* Workers::find_session(SessionId session) {
  for (auto& [id, worker] : workers_) {
    if (worker->session == session) return worker.get();
  }
  return nullptr;
}

}  // namespace polykv::daemon
