#include "examples/fifteen_agents/documents.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "common/fd.h"
#include "examples/fifteen_agents/pool.h"

namespace polykv::example {

namespace {

using Clock = std::chrono::steady_clock;
double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

/// Progress of one ingest, on a terminal as one line that changes.
struct IngestReport {
  bool is_terminal = ::isatty(STDERR_FILENO) == 1;
  bool prefill_seen = false;
  Clock::time_point prefill_start;
  uint64_t token_count = 0;
  std::function<void()> on_prefill_start;

  static int on_progress(void* user, const polykv_ingest_progress* progress) {
    auto* report = static_cast<IngestReport*>(user);
    if (progress->phase == POLYKV_INGEST_PREFILLING && !report->prefill_seen) {
      report->prefill_seen = true;
      report->prefill_start = Clock::now();
      if (report->on_prefill_start) report->on_prefill_start();
    }
    report->token_count = std::max(report->token_count, progress->token_count);
    if (report->is_terminal && progress->phase == POLYKV_INGEST_PREFILLING) {
      std::fprintf(stderr, "\r  prefilled %llu of %llu tokens ",
                   static_cast<unsigned long long>(progress->tokens_done),
                   static_cast<unsigned long long>(progress->token_count));
      if (progress->tokens_done == progress->token_count) std::fputc('\n', stderr);
    }
    return 0;
  }
};

}  // namespace

Result<PutResult> put_document(const RunOptions& options, std::function<void()> on_prefill_start) {
  POLYKV_ASSIGN_OR_RETURN(const SessionHandle session, connect(options.socket_path));
  const UniqueFd model(::open(options.model_path.c_str(), O_RDONLY | O_CLOEXEC));
  const UniqueFd text(::open(options.document_path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!model || !text) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("put '%s': cannot open it or the model '%s'; check both paths",
                   options.document_path.c_str(), options.model_path.c_str())};
  }
  IngestReport report;
  report.on_prefill_start = std::move(on_prefill_start);
  polykv_ingest_options ingest;
  polykv_ingest_options_init(&ingest);
  POLYKV_RETURN_IF_ERROR(check(polykv_profile_from_name(options.codec.c_str(), &ingest.profile)));
  ingest.name = options.document_name.c_str();
  ingest.model_fd = model.get();
  ingest.text_fd = text.get();
  ingest.flags = POLYKV_INGEST_CHAT_HEAD | POLYKV_INGEST_REPLACE_NAME;
  ingest.on_progress = &IngestReport::on_progress;
  ingest.user = &report;
  const auto start = Clock::now();
  polykv_lease* lease = nullptr;
  POLYKV_RETURN_IF_ERROR(check(polykv_document_ingest(session.get(), &ingest, &lease)));
  const auto end = Clock::now();
  const LeaseHandle owner(lease);
  polykv_document_info info;
  polykv_document_info_init(&info);
  POLYKV_RETURN_IF_ERROR(check(polykv_lease_info(lease, &info)));
  PutResult result;
  if (report.prefill_seen) result.prefill_seconds = seconds_between(report.prefill_start, end);
  result.total_seconds = seconds_between(start, end);
  result.token_count = info.token_count;
  result.stored_bytes = info.stored_bytes;
  result.bf16_bytes = info.bf16_bytes;
  return result;
}

Status put_beginning(const RunOptions& options, uint32_t token_count, const std::string& name) {
  POLYKV_ASSIGN_OR_RETURN(const SessionHandle session, connect(options.socket_path));
  POLYKV_ASSIGN_OR_RETURN(const LeaseHandle document,
                          acquire(session.get(), options.document_name));
  std::vector<uint32_t> tokens(token_count);
  POLYKV_RETURN_IF_ERROR(check(polykv_lease_tokens(document.get(), 0, token_count, tokens.data())));
  const UniqueFd model(::open(options.model_path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!model) return system_error("open '" + options.model_path + "'", errno, "check the path");
  polykv_ingest_options ingest;
  polykv_ingest_options_init(&ingest);
  POLYKV_RETURN_IF_ERROR(check(polykv_profile_from_name(options.codec.c_str(), &ingest.profile)));
  ingest.name = name.c_str();
  ingest.model_fd = model.get();
  ingest.tokens = tokens.data();
  ingest.token_count = tokens.size();
  ingest.flags = POLYKV_INGEST_REPLACE_NAME;
  return check(polykv_document_ingest(session.get(), &ingest, nullptr));
}

}  // namespace polykv::example
