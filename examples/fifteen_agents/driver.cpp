#include "examples/fifteen_agents/driver.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <thread>

#include "examples/fifteen_agents/agent.h"
#include "examples/fifteen_agents/agent_process.h"
#include "examples/fifteen_agents/pool.h"
#include "examples/fifteen_agents/questions.h"

namespace polykv::example {

namespace {

using Clock = std::chrono::steady_clock;
double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}
double mib(uint64_t bytes) {
  return static_cast<double>(bytes) / (1024.0 * 1024.0);
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

struct PutResult {
  double prefill_seconds = 0;  // 0: it was there already
  double total_seconds = 0;    // worker start, loading the model, tokenizing, prefill, encoding
  uint64_t token_count = 0;
  uint64_t stored_bytes = 0;
  uint64_t bf16_bytes = 0;
  double first_token_after_sealed_seconds = 0;  // of an agent that read it meanwhile
};

Result<PutResult> put_document(const RunOptions& options,
                               std::function<void()> on_prefill_start = {}) {
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

std::vector<std::string> agent_arguments(const RunOptions& options, bool with_pool,
                                         uint32_t thread_count,
                                         const std::vector<uint32_t>& questions) {
  std::vector<std::string> words = {"agent",
                                    "--model",
                                    options.model_path,
                                    "--weights",
                                    options.weights_path,
                                    "--max-tokens",
                                    std::to_string(options.max_tokens),
                                    "--threads",
                                    std::to_string(thread_count)};
  if (!options.socket_path.empty()) words.insert(words.end(), {"--socket", options.socket_path});
  if (with_pool)
    words.insert(words.end(), {"--name", options.document_name});
  else
    words.insert(words.end(), {"--document", options.document_path});
  words.emplace_back("--questions");
  for (const uint32_t question : questions) words.push_back(std::to_string(question));
  return words;
}

/// One agent decodes the document segment by segment as polykvd seals them.
Result<PutResult> put_while_agent_reads(const RunOptions& options) {
  POLYKV_ASSIGN_OR_RETURN(AgentProcess reader, AgentProcess::start(agent_arguments(
                                                   options, true, options.thread_count, {0})));
  POLYKV_RETURN_IF_ERROR(reader.expect("ready").status());
  Status told;
  POLYKV_ASSIGN_OR_RETURN(PutResult put, put_document(options, [&] { told = reader.tell("go"); }));
  POLYKV_RETURN_IF_ERROR(told);
  if (put.prefill_seconds == 0) return put;
  POLYKV_ASSIGN_OR_RETURN(const nlohmann::json answer, reader.expect("answer"));
  put.first_token_after_sealed_seconds = answer["after_sealed_ms"].get<double>() / 1000;
  POLYKV_RETURN_IF_ERROR(reader.expect("holding").status());
  POLYKV_RETURN_IF_ERROR(reader.finish());
  return put;
}

struct Batch {
  std::vector<nlohmann::json> answers;  // one line per agent and question
  PoolMappings mappings;                // sum over all agents
  uint64_t one_mapping_bytes = 0;
};

/// Starts the agents, lets them begin together, reads their answers and, while all still hold the
/// document, smaps.
Result<Batch> run_batch(const std::vector<std::vector<std::string>>& commands,
                        size_t answers_each) {
  std::vector<AgentProcess> agents;
  for (const auto& command : commands) {
    POLYKV_ASSIGN_OR_RETURN(AgentProcess agent, AgentProcess::start(command));
    agents.push_back(std::move(agent));
  }
  for (AgentProcess& agent : agents) POLYKV_RETURN_IF_ERROR(agent.expect("ready").status());
  for (AgentProcess& agent : agents) POLYKV_RETURN_IF_ERROR(agent.tell("go"));
  Batch batch;
  for (AgentProcess& agent : agents) {
    for (size_t i = 0; i < answers_each; ++i) {
      POLYKV_ASSIGN_OR_RETURN(nlohmann::json answer, agent.expect("answer"));
      batch.answers.push_back(std::move(answer));
    }
    POLYKV_RETURN_IF_ERROR(agent.expect("holding").status());
  }
  for (const AgentProcess& agent : agents) {
    POLYKV_ASSIGN_OR_RETURN(const PoolMappings one, pool_mappings(agent.pid()));
    batch.mappings.size_bytes += one.size_bytes;
    batch.mappings.rss_bytes += one.rss_bytes;
    batch.mappings.pss_bytes += one.pss_bytes;
    batch.one_mapping_bytes = std::max(batch.one_mapping_bytes, one.size_bytes);
  }
  for (AgentProcess& agent : agents) POLYKV_RETURN_IF_ERROR(agent.finish());
  return batch;
}

std::vector<double> first_token_seconds(const Batch& batch) {
  std::vector<double> seconds;
  for (const nlohmann::json& answer : batch.answers) {
    if (answer.contains("first_token_ms"))
      seconds.push_back(answer["first_token_ms"].get<double>() / 1000);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

void print_answers(const Batch& batch) {
  for (size_t i = 0; i < batch.answers.size(); ++i) {
    const nlohmann::json& answer = batch.answers[i];
    std::string text = answer["text"];
    std::replace(text.begin(), text.end(), '\n', ' ');
    std::printf("  agent %2zu  %s\n            %s\n", i + 1,
                kQuestions[answer["question"].get<size_t>()], text.c_str());
  }
}

Status write_json(const std::string& path, const nlohmann::json& report) {
  if (path.empty()) return Status::ok();
  std::ofstream file(path);
  file << report.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  if (!file.flush())
    return {POLYKV_ERR_SYSTEM, "write '" + path + "': failed; check the path and the disk"};
  return Status::ok();
}

}  // namespace

Status run_agents(const RunOptions& options) {
  std::printf("1. The model's weights, once for all agents: %s\n", options.weights_path.c_str());
  POLYKV_RETURN_IF_ERROR(
      prepare_weights(options.model_path, options.weights_path, options.thread_count));

  std::printf("2. polykvd computes and encodes '%s' once\n", options.document_path.c_str());
  std::fflush(stdout);
  POLYKV_ASSIGN_OR_RETURN(const PutResult put, put_while_agent_reads(options));
  if (put.prefill_seconds > 0) {
    std::printf(
        "   %llu tokens: %.1f s of prefill (%.1f s with starting the worker and loading the "
        "model)\n",
        static_cast<unsigned long long>(put.token_count), put.prefill_seconds, put.total_seconds);
    std::printf(
        "   an agent that read it meanwhile: first token %.3f s after the last segment was "
        "sealed\n",
        put.first_token_after_sealed_seconds);
  } else {
    std::printf("   %llu tokens: it was there already\n",
                static_cast<unsigned long long>(put.token_count));
  }

  std::printf("3. One agent, from connect() to its first token id\n");
  std::fflush(stdout);
  POLYKV_ASSIGN_OR_RETURN(
      const Batch one_pool,
      run_batch({agent_arguments(options, true, options.thread_count, {0})}, 1));
  const double with_pool = first_token_seconds(one_pool).front();
  std::printf("   with the pool     %8.3f s\n", with_pool);
  std::fflush(stdout);
  POLYKV_ASSIGN_OR_RETURN(
      const Batch one_alone,
      run_batch({agent_arguments(options, false, options.thread_count, {0})}, 1));
  const double alone = first_token_seconds(one_alone).front();
  std::printf("   without the pool  %8.3f s, %.0f times longer\n", alone, alone / with_pool);

  std::printf("4. %u agent processes at once (one thread each)\n", options.agent_count);
  std::fflush(stdout);
  std::vector<std::vector<std::string>> commands;
  for (uint32_t i = 0; i < options.agent_count; ++i) {
    commands.push_back(
        agent_arguments(options, true, 1, {i % static_cast<uint32_t>(kQuestions.size())}));
  }
  POLYKV_ASSIGN_OR_RETURN(const Batch many, run_batch(commands, 1));
  print_answers(many);
  const std::vector<double> many_seconds = first_token_seconds(many);
  double all_alone = alone * options.agent_count;
  if (options.measure_all_alone) {
    std::printf("   the same without the pool\n");
    std::fflush(stdout);
    commands.clear();
    for (uint32_t i = 0; i < options.agent_count; ++i) {
      commands.push_back(
          agent_arguments(options, false, 1, {i % static_cast<uint32_t>(kQuestions.size())}));
    }
    POLYKV_ASSIGN_OR_RETURN(const Batch many_alone, run_batch(commands, 1));
    all_alone = first_token_seconds(many_alone).back();
  }
  std::printf("   first token after: fastest %.3f s, median %.3f s, slowest %.3f s\n",
              many_seconds.front(), many_seconds[many_seconds.size() / 2], many_seconds.back());
  std::printf(
      "   without the pool the slowest after %.1f s (%s)\n", all_alone,
      options.measure_all_alone ? "measured" : "computed: the one agent's time times their number");

  std::printf("5. Memory for the document's KV\n");
  const double ratio = static_cast<double>(put.bf16_bytes) / static_cast<double>(put.stored_bytes);
  std::printf(
      "   the pool, everything counted (%s)       %9.1f MiB, %.2f times smaller than bf16\n",
      options.codec.c_str(), mib(put.stored_bytes), ratio);
  std::printf("   %2u bf16 caches                            %9.1f MiB\n", options.agent_count,
              mib(put.bf16_bytes * options.agent_count));
  const double pss_ratio =
      static_cast<double>(many.mappings.pss_bytes) / static_cast<double>(many.one_mapping_bytes);
  std::printf(
      "   the pool in %2u processes, sum of PSS      %9.1f MiB, %.4f of one mapping (%.1f MiB)\n",
      options.agent_count, mib(many.mappings.pss_bytes), pss_ratio, mib(many.one_mapping_bytes));

  nlohmann::json report = {
      {"document_tokens", put.token_count},
      {"codec", options.codec},
      {"prefill_seconds", put.prefill_seconds},
      {"put_seconds", put.total_seconds},
      {"first_token_after_sealed_seconds", put.first_token_after_sealed_seconds},
      {"one_agent_pool_seconds", with_pool},
      {"one_agent_alone_seconds", alone},
      {"agents", options.agent_count},
      {"agents_pool_seconds", many_seconds},
      {"agents_alone_seconds", all_alone},
      {"agents_alone_measured", options.measure_all_alone},
      {"stored_bytes", put.stored_bytes},
      {"bf16_bytes", put.bf16_bytes},
      {"pss_sum_bytes", many.mappings.pss_bytes},
      {"one_mapping_bytes", many.one_mapping_bytes},
      {"answers", many.answers},
  };
  POLYKV_RETURN_IF_ERROR(write_json(options.json_path, report));
  if (many.one_mapping_bytes != put.stored_bytes) {
    return {POLYKV_ERR_INTERNAL, format("measure: an agent maps %llu bytes of a pool of %llu",
                                        static_cast<unsigned long long>(many.one_mapping_bytes),
                                        static_cast<unsigned long long>(put.stored_bytes))};
  }
  if (pss_ratio < 0.98 || pss_ratio > 1.02) {
    return {POLYKV_ERR_INTERNAL,
            format("measure: %u agents hold %.3f times one mapping; is somebody else holding it?",
                   options.agent_count, pss_ratio)};
  }
  return Status::ok();
}

Status compare_answers(const CompareOptions& options) {
  RunOptions run = options.run;
  run.codec = "exact";
  POLYKV_RETURN_IF_ERROR(prepare_weights(run.model_path, run.weights_path, run.thread_count));
  POLYKV_ASSIGN_OR_RETURN(const PutResult put, put_document(run));
  std::vector<uint32_t> questions(std::min<size_t>(options.question_count, kQuestions.size()));
  for (uint32_t i = 0; i < questions.size(); ++i) questions[i] = i;
  POLYKV_ASSIGN_OR_RETURN(
      const Batch pooled,
      run_batch({agent_arguments(run, true, run.thread_count, questions)}, questions.size()));
  POLYKV_ASSIGN_OR_RETURN(
      const Batch plain,
      run_batch({agent_arguments(run, false, run.thread_count, questions)}, questions.size()));
  uint32_t equal = 0;
  uint32_t near_ties = 0;
  uint32_t different = 0;
  for (size_t i = 0; i < questions.size(); ++i) {
    const std::vector<uint32_t> a = pooled.answers[i]["ids"];
    const std::vector<uint32_t> b = plain.answers[i]["ids"];
    const auto [left, right] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    const auto position = static_cast<size_t>(right - b.begin());
    if (left == a.end() && right == b.end())
      ++equal;
    else if (position < b.size() &&
             plain.answers[i]["gaps"][position].get<double>() <= options.near_tie)
      ++near_ties;
    else
      ++different;
  }
  std::printf(
      "%zu questions over %llu tokens, exact f32: %u answers equal, %u differ first at a near tie, "
      "%u differ\n",
      questions.size(), static_cast<unsigned long long>(put.token_count), equal, near_ties,
      different);
  if (different != 0) return {POLYKV_ERR_INTERNAL, format("compare answers: %u differ", different)};
  return Status::ok();
}

}  // namespace polykv::example
