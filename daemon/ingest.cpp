#include "daemon/ingest.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "kernels/codec.h"
#include "polykv/polykv.h"

namespace polykv::daemon {

namespace {

Status bad_request(const std::string& why) {
  return {POLYKV_ERR_INVALID_ARGUMENT, std::string("ingest: ") + why};
}

/// MemAvailable is left out: a worker asks for it itself, right before it allocates.
std::optional<uint64_t> control_group_free_bytes(const Core& core) {
  const Result<std::vector<MemoryHeadroom>> measured = core.memory.measure();
  if (!measured.is_ok()) return std::nullopt;
  std::optional<uint64_t> least;
  for (const MemoryHeadroom& headroom : *measured) {
    if (headroom.name == kThisMachine) continue;
    const uint64_t reserve = std::min(headroom.free_bytes, core.limits.memory_reserve_bytes);
    least = std::min(least.value_or(headroom.free_bytes), headroom.free_bytes - reserve);
  }
  return least;
}

WorkersConfig workers_config(const Options& options, const Core& core) {
  WorkersConfig config;
  config.control_group_free_bytes = [&core] { return control_group_free_bytes(core); };
  config.program = options.worker_path;
  config.thread_count = options.worker_threads != 0
                            ? static_cast<uint32_t>(options.worker_threads)
                            : std::max(1U, std::thread::hardware_concurrency());
  config.device = options.worker_device;
  config.cuda_library = options.cuda_library;
  const BackingFacts& backing = core.backing.facts();
  config.documents_on_gpu = backing.is_cuda();
  config.gpu_uuid =
      backing.is_cuda() ? device::uuid_text(backing.device.uuid) : options.cuda_device;
  config.memory_limit_bytes = options.worker_memory_limit_bytes;
  config.idle_ms = options.worker_idle_ms;
  config.start_deadline_ms = options.worker_start_deadline_ms;
  config.stall_deadline_ms = options.stall_deadline_ms;
  return config;
}

}  // namespace

Ingest::Ingest(Core& core, Leases& leases, const Options& options)
    : core_(core),
      leases_(leases),
      models_(options.models),
      workers_(core.loop, core.server, core.counters, workers_config(options, core)) {}

// ---- requests ----------------------------------------------------------------------------------

void Ingest::on_ingest(Session& session, uint64_t request_id, const wire::Ingest& request,
                       std::vector<UniqueFd> fds) {
  const RequestKey key{session.id, request_id};
  const auto refuse = [&](const Status& why) {
    core_.server.reply_error(session.id, request_id, why);
  };
  Result<Request> read = read_request(session, request);
  if (!read.is_ok()) return refuse(read.status());
  const Result<JobId> job = submit(key, session, *read, request, std::move(fds));
  if (!job.is_ok()) return refuse(job.status());
  read->job = *job;
  requests_.insert_or_assign(key, std::move(*read));
}

Result<Ingest::Request> Ingest::read_request(const Session& session,
                                             const wire::Ingest& request) const {
  const std::string_view name = text_or_empty(request.name());
  const bool has_model_name = !text_or_empty(request.model_name()).empty();
  if (has_model_name == request.has_model_fd())
    return bad_request("give either a model of the configuration or a model file");
  if (request.has_text_fd() == (request.token_count() > 0))
    return bad_request("give either a text or token ids");
  if (request.has_before_fd() && !request.has_text_fd())
    return bad_request("token ids are the whole document; a text before them cannot be added");
  if (request.share_public() && !has_model_name) {
    return Status(POLYKV_ERR_PERMISSION,
                  "ingest: only what a model of the configuration computed may be public; name one "
                  "or leave --share out");
  }
  if (!name.empty()) POLYKV_RETURN_IF_ERROR(check_name(name));
  Request result;
  result.profile = static_cast<Profile>(request.profile());
  const bool is_extension =
      request.extend_digest() != nullptr || !text_or_empty(request.extend_name()).empty();
  if (profile_name(result.profile) == std::string("unknown") ||
      (result.profile == Profile::any && !is_extension)) {
    return bad_request(format("codec profile %u is unknown; `polykvctl put --help` lists them",
                              request.profile()));
  }
  result.want_lease = request.want_lease();
  result.context.domain = request.share_public() ? kPublicDomain : Domain{session.uid};
  result.context.owner = session.uid;
  result.context.name = name;
  result.context.replace_name = request.replace_name();
  if (is_extension) POLYKV_RETURN_IF_ERROR(read_extension(session, request, result));
  return result;
}

/// A text that continues a document: which, and under whose name.
Status Ingest::read_extension(const Session& session, const wire::Ingest& request,
                              Request& result) const {
  Selector selector;
  selector.name = text_or_empty(request.extend_name());
  if (!selector.name.empty()) POLYKV_RETURN_IF_ERROR(check_name(selector.name));
  if (request.extend_digest() != nullptr) {
    if (!selector.name.empty()) return bad_request("name the document to extend in one way only");
    selector.digest = from_wire(*request.extend_digest());
  }
  if (request.add_bos() || request.chat_head() || request.has_before_fd())
    return bad_request("what extends a document comes behind it; nothing can be put in front");
  std::shared_ptr<Document> base;
  // One that can be extended, where there are several profiles.
  std::vector<Profile> profiles(shareable_profiles().begin(), shareable_profiles().end());
  profiles.push_back(Profile::any);
  if (result.profile != Profile::any) profiles = {result.profile};
  for (const Profile profile : profiles) {
    selector.profile = profile;
    if (base == nullptr) base = core_.catalog.find(result.context.domain, selector);
    if (base == nullptr) base = core_.catalog.find(kPublicDomain, selector);
  }
  if (base == nullptr) {
    return {POLYKV_ERR_NOT_FOUND,
            "ingest: the document to extend is not there; `polykvctl ls` "
            "lists what is, and in which codec profile"};
  }
  if (!is_shareable(base->key.profile)) {
    return {POLYKV_ERR_UNSUPPORTED,
            std::string("ingest: a document of profile ") + profile_name(base->key.profile) +
                " is one segment and cannot be extended; use another profile"};
  }
  result.profile = base->key.profile;
  result.extends = base->key.digest;
  if (!result.context.name.empty() || selector.name.empty()) return Status::ok();
  if (base->key.domain != result.context.domain || base->owner != session.uid) {
    return bad_request("the document to extend is public and keeps its name; name the longer one");
  }
  result.moved_name = selector.name;
  return Status::ok();
}

Result<JobId> Ingest::submit(RequestKey key, const Session& session, const Request& what,
                             const wire::Ingest& request, std::vector<UniqueFd> fds) {
  size_t next_fd = 0;
  UniqueFd model_fd;
  if (request.has_model_fd()) model_fd = std::move(fds[next_fd++]);
  POLYKV_ASSIGN_OR_RETURN(const ModelFile model,
                          open_model(session.uid, std::string(text_or_empty(request.model_name())),
                                     std::move(model_fd)));
  JobSpec spec;
  spec.has_text_fd = request.has_text_fd();
  spec.token_count = request.token_count();
  spec.has_before_fd = request.has_before_fd();
  spec.profile = static_cast<uint32_t>(what.profile);
  spec.extends = what.extends;
  spec.recompute_prefix = request.recompute_prefix();
  spec.add_bos = request.add_bos();
  spec.parse_special = request.parse_special();
  spec.chat_head = request.chat_head();
  for (; next_fd < fds.size(); ++next_fd)
    spec.fds.push_back(std::make_shared<const UniqueFd>(std::move(fds[next_fd])));
  JobCallbacks callbacks;
  callbacks.on_progress = [this, key](const JobProgress& progress) {
    on_job_progress(key, progress);
  };
  callbacks.on_end = [this, key](const Status& status, const Digest& digest) {
    on_job_end(key, status, digest);
  };
  return workers_.submit(model, std::move(spec), std::move(callbacks));
}

Result<ModelFile> Ingest::open_model(uid_t uid, const std::string& model_name,
                                     UniqueFd model_fd) const {
  ModelFile model;
  model.name = model_name.empty() ? "passed by the client" : model_name;
  if (!model_name.empty()) {
    const auto found =
        std::find_if(models_.begin(), models_.end(),
                     [&](const ConfiguredModel& entry) { return entry.name == model_name; });
    if (found == models_.end()) {
      return {POLYKV_ERR_NOT_FOUND, "look for model '" + model_name +
                                        "': polykvd's configuration has no such line in [models]; "
                                        "add one, or give a model file"};
    }
    // Non-blocking, so that a FIFO at that path cannot stop the daemon; a file does not care.
    model_fd.reset(::open(found->path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!model_fd) {
      return {POLYKV_ERR_NOT_FOUND,
              format("open model '%s' at '%s': %s; correct [models] in polykvd's configuration",
                     model_name.c_str(), found->path.c_str(),
                     std::strerror(errno))};  // NOLINT(concurrency-mt-unsafe): known numbers
    }
  }
  const Result<FileIdentity> file = file_identity(model_fd.get());
  if (!file.is_ok()) return file.status().with_context("model " + model.name);
  model.key = {uid, *file};
  model.file = std::make_shared<const UniqueFd>(std::move(model_fd));
  return model;
}

bool Ingest::cancel(SessionId session, uint64_t request_id) {
  const auto found = requests_.find({session, request_id});
  if (found == requests_.end()) return false;
  const JobId job = found->second.job;
  requests_.erase(found);
  workers_.cancel(job);
  core_.server.reply_error(session, request_id, {POLYKV_ERR_CANCELLED, "ingest: cancelled"});
  return true;
}

size_t Ingest::pending_count(SessionId session) const {
  const auto first = requests_.lower_bound({session, 0});
  const auto last = requests_.lower_bound({session + 1, 0});
  return static_cast<size_t>(std::distance(first, last));
}

void Ingest::on_session_end(Session& session) {
  if (session.kind == SessionKind::worker) return workers_.on_session_end(session.id);
  const auto first = requests_.lower_bound({session.id, 0});
  const auto last = requests_.lower_bound({session.id + 1, 0});
  std::vector<JobId> jobs;
  for (auto entry = first; entry != last; ++entry) jobs.push_back(entry->second.job);
  requests_.erase(first, last);
  for (const JobId job : jobs) workers_.cancel(job);
}

// ---- what comes of them ------------------------------------------------------------------------

void Ingest::on_job_progress(RequestKey key, const JobProgress& progress) {
  if (!requests_.contains(key)) return;
  // Only the newest counts: a caller that is slow to read must not be dropped for it.
  const Session* session = core_.server.find(key.first);
  if (session == nullptr || !session->output.empty()) return;
  flatbuffers::FlatBufferBuilder builder;
  const auto body = wire::CreateIngestProgress(builder, progress.phase, progress.tokens_done,
                                               progress.token_count, progress.memory_bytes);
  send_packet(core_.server, key.first, builder, key.second, body);
}

void Ingest::on_job_end(RequestKey key, const Status& status, const Digest& digest) {
  const auto found = requests_.find(key);
  if (found == requests_.end()) return;  // cancelled, or its session has ended
  const Request request = std::move(found->second);
  requests_.erase(found);
  if (!status.is_ok()) return core_.server.reply_error(key.first, key.second, status);
  const Result<std::shared_ptr<Document>> document = finish(request, digest);
  if (!document.is_ok()) return core_.server.reply_error(key.first, key.second, document.status());
  const uint64_t token_count = (*document)->tokens->size();
  flatbuffers::FlatBufferBuilder builder;
  send_packet(core_.server, key.first, builder, key.second,
              wire::CreateIngestProgress(builder, POLYKV_INGEST_SEALED, token_count, token_count));
  if (request.want_lease) return leases_.grant(key.first, key.second, *document);
  core_.server.reply_done(key.first, key.second);
}

Result<std::shared_ptr<Document>> Ingest::finish(const Request& request, const Digest& digest) {
  Selector selector;
  selector.digest = digest;
  selector.profile = request.profile;
  std::shared_ptr<Document> document = core_.catalog.find(request.context.domain, selector);
  // A private request may have been met by a document that is public already.
  if (document == nullptr) document = core_.catalog.find(kPublicDomain, selector);
  if (document == nullptr) {
    return {POLYKV_ERR_NOT_FOUND,
            "ingest: the document was removed or evicted at once; put it again, or raise the "
            "memory budget"};
  }
  if (!request.moved_name.empty()) {
    POLYKV_RETURN_IF_ERROR(move_name(*document, request));
    return document;
  }
  const JobContext& context = request.context;
  if (context.name.empty() || document->names.contains(context.name)) return document;
  if (document->key.domain == kPublicDomain && document->owner != context.owner) {
    return {POLYKV_ERR_PERMISSION,
            "ingest: the document is public already and belongs to another user; take it by its "
            "own name"};
  }
  POLYKV_RETURN_IF_ERROR(core_.catalog.give_name(*document, context.name, context.replace_name,
                                                 core_.limits.names_per_document));
  return document;
}

/// The name goes to the longer document only if it still is that of the one that was extended:
/// otherwise one of two extensions at the same time would be lost without a word.
Status Ingest::move_name(Document& document, const Request& request) {
  Selector selector;
  selector.name = request.moved_name;
  const auto named = core_.catalog.find(document.key.domain, selector);
  if (named != nullptr && named->key == document.key) return Status::ok();
  if (named == nullptr || named->key.digest != *request.extends) {
    return {POLYKV_ERR_BUSY,
            "ingest: name '" + request.moved_name +
                "' was given to another document or removed meanwhile; extend it again"};
  }
  return core_.catalog.give_name(document, request.moved_name, true,
                                 core_.limits.names_per_document);
}

// ---- workers -----------------------------------------------------------------------------------

void Ingest::on_worker_ready(Session& worker) {
  workers_.on_session_ready(worker.id);
}

void Ingest::on_worker_packet(Session& worker, const wire::Packet& packet) {
  workers_.on_packet(worker.id, packet);
}

std::optional<JobContext> Ingest::job_context(SessionId worker, uint64_t job) const {
  if (job == 0 || workers_.running_job(worker) != job) return std::nullopt;
  for (const auto& [key, request] : requests_) {
    if (request.job == job) return request.context;
  }
  return std::nullopt;
}

void Ingest::identify(uid_t uid, const std::string& model_name, UniqueFd model_fd,
                      IdentityCallback callback) {
  const Result<ModelFile> model = open_model(uid, model_name, std::move(model_fd));
  if (!model.is_ok()) return callback(model.status());
  workers_.identify(*model, std::move(callback));
}

}  // namespace polykv::daemon
