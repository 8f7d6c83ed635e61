#include "examples/fifteen_agents/driver.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "examples/fifteen_agents/batch.h"
#include "examples/fifteen_agents/documents.h"
#include "examples/fifteen_agents/questions.h"

namespace polykv::example {

namespace {

constexpr uint32_t kShortTokens = 64;  // of the document that memory and times are compared with
constexpr double kNearTie = 0.05;      // between the logits of two tokens

double mib(uint64_t bytes) {
  return static_cast<double>(bytes) / (1024.0 * 1024.0);
}
double mib(int64_t bytes) {
  return static_cast<double>(bytes) / (1024.0 * 1024.0);
}

/// What is printed as it is measured, and ends in the JSON.
struct Figures {
  PutResult put;
  Batch one_decode;
  Batch one_attend;
  Batch one_short;  // attends to the short document
  Batch one_alone;
  Batch many_decode;
  Batch many_attend;
  Batch many_short;
  double all_alone_seconds = 0;
};

std::string short_name(const RunOptions& options) {
  return options.document_name + "-beginning";
}

Task one_task(const RunOptions& options, const std::string& document, Read read) {
  Task task;
  task.document_name = document;
  task.read = read;
  task.thread_count = options.thread_count;
  task.max_tokens = options.max_tokens;
  task.ignore_end = true;  // as many tokens by all ways
  task.questions = {0};
  return task;
}

std::vector<Task> many_tasks(const RunOptions& options, const std::string& document, Read read) {
  std::vector<Task> tasks(options.agent_count);
  for (uint32_t i = 0; i < options.agent_count; ++i) {
    tasks[i].document_name = document;
    tasks[i].read = read;
    tasks[i].max_tokens = read == Read::attend ? options.attend_tokens : options.max_tokens;
    tasks[i].ignore_end = read == Read::attend;
    tasks[i].questions = {i % static_cast<uint32_t>(kQuestions.size())};
  }
  return tasks;
}

/// One agent decodes the document segment by segment as polykvd seals them.
Result<PutResult> put_while_agent_reads(const RunOptions& options) {
  const Task task = one_task(options, options.document_name, Read::decode);
  POLYKV_ASSIGN_OR_RETURN(AgentProcess reader, AgentProcess::start(agent_arguments(options, task)));
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

Status put(const RunOptions& options, Figures& figures) {
  std::printf("2. polykvd computes and encodes '%s' once\n", options.document_path.c_str());
  std::fflush(stdout);
  POLYKV_ASSIGN_OR_RETURN(figures.put, put_while_agent_reads(options));
  const PutResult& put = figures.put;
  const auto tokens = static_cast<unsigned long long>(put.token_count);
  if (put.prefill_seconds > 0) {
    std::printf(
        "   %llu tokens: %.1f s of prefill (%.1f s with starting the worker and loading the "
        "model)\n",
        tokens, put.prefill_seconds, put.total_seconds);
    std::printf(
        "   an agent that read it meanwhile: first token %.3f s after the last segment was "
        "sealed\n",
        put.first_token_after_sealed_seconds);
  } else {
    std::printf("   %llu tokens: it was there already\n", tokens);
  }
  return put_beginning(options, kShortTokens, short_name(options));
}

void print_one(const char* how, const Batch& batch) {
  std::printf("   %-34s %8.3f s, then %6.1f ms a token\n", how, first_token_seconds(batch).front(),
              median_token_ms(batch));
  std::fflush(stdout);
}

Status run_one(const RunOptions& options, Figures& figures) {
  std::printf("3. One agent, from connect() to its first token id, and each token after it\n");
  std::fflush(stdout);
  const auto run = [&](const std::string& document, Read read) {
    return run_batch(options, {one_task(options, document, read)});
  };
  POLYKV_ASSIGN_OR_RETURN(figures.one_decode, run(options.document_name, Read::decode));
  print_one("with the pool, decoding it", figures.one_decode);
  POLYKV_ASSIGN_OR_RETURN(figures.one_attend, run(options.document_name, Read::attend));
  print_one("with the pool, attending to it", figures.one_attend);
  POLYKV_ASSIGN_OR_RETURN(figures.one_short, run(short_name(options), Read::attend));
  print_one("the first 64 tokens, attended to", figures.one_short);
  POLYKV_ASSIGN_OR_RETURN(figures.one_alone, run("", Read::decode));
  print_one("without the pool", figures.one_alone);
  const double alone = first_token_seconds(figures.one_alone).front();
  std::printf("   without the pool the first token takes %.0f times longer than decoding it\n",
              alone / first_token_seconds(figures.one_decode).front());
  figures.all_alone_seconds = alone * options.agent_count;
  return Status::ok();
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

void print_many(const char* how, const Batch& batch) {
  const std::vector<double> seconds = first_token_seconds(batch);
  std::printf("   %s: first token after: fastest %.3f s, median %.3f s, slowest %.3f s\n", how,
              seconds.front(), seconds[seconds.size() / 2], seconds.back());
  std::fflush(stdout);
}

Status run_many(const RunOptions& options, Figures& figures) {
  std::printf("4. %u agent processes at once (one thread each)\n", options.agent_count);
  std::fflush(stdout);
  const auto run = [&](const std::string& document, Read read) {
    return run_batch(options, many_tasks(options, document, read));
  };
  POLYKV_ASSIGN_OR_RETURN(figures.many_decode, run(options.document_name, Read::decode));
  print_answers(figures.many_decode);
  print_many("decoding", figures.many_decode);
  POLYKV_ASSIGN_OR_RETURN(figures.many_attend, run(options.document_name, Read::attend));
  print_many("attending", figures.many_attend);
  const Comparison comparison = compare(figures.many_attend, figures.many_decode, kNearTie);
  std::printf(
      "   answers by both ways: %u are the same tokens, %u part where two tokens were about as "
      "likely, %u differ\n",
      comparison.equal, comparison.near_ties, comparison.different);
  POLYKV_ASSIGN_OR_RETURN(figures.many_short, run(short_name(options), Read::attend));
  if (options.measure_all_alone) {
    POLYKV_ASSIGN_OR_RETURN(const Batch alone, run("", Read::decode));
    figures.all_alone_seconds = first_token_seconds(alone).back();
  }
  std::printf(
      "   without the pool the slowest after %.1f s (%s)\n", figures.all_alone_seconds,
      options.measure_all_alone ? "measured" : "computed: the one agent's time times their number");
  return Status::ok();
}

double pss_ratio(const Batch& batch) {
  return static_cast<double>(batch.mappings.pss_bytes) /
         static_cast<double>(batch.one_mapping_bytes);
}

void print_memory(const RunOptions& options, const Figures& figures) {
  const PutResult& put = figures.put;
  const uint32_t count = options.agent_count;
  std::printf("5. Memory for the document's KV\n");
  std::printf(
      "   the pool, everything counted (%s)       %9.1f MiB, %.2f times smaller than bf16\n",
      options.codec.c_str(), mib(put.stored_bytes),
      static_cast<double>(put.bf16_bytes) / static_cast<double>(put.stored_bytes));
  std::printf("   %2u bf16 caches                            %9.1f MiB\n", count,
              mib(put.bf16_bytes * count));
  const Batch& attend = figures.many_attend;
  std::printf(
      "   the pool in %2u processes, sum of PSS      %9.1f MiB, %.4f of one mapping (%.1f MiB)\n",
      count, mib(attend.mappings.pss_bytes), pss_ratio(attend), mib(attend.one_mapping_bytes));
  std::printf("   private pages of its mappings in them     %9.1f MiB\n",
              mib(attend.mappings.private_bytes));
  std::printf("   what an agent grew by of its own, from before it attached to its last token:\n");
  const auto growth = [](const char* how, uint32_t tokens, const Batch& batch) {
    std::printf("     %-39s %9.1f MiB (%u tokens)\n", how, mib(largest_growth_bytes(batch)),
                tokens);
  };
  growth("decoding", options.max_tokens, figures.many_decode);
  growth("attending", options.attend_tokens, attend);
  growth("attending to the first 64 tokens of it", options.attend_tokens, figures.many_short);
}

nlohmann::json to_json(const RunOptions& options, const Figures& figures) {
  const PutResult& put = figures.put;
  const Comparison comparison = compare(figures.many_attend, figures.many_decode, kNearTie);
  const Batch& attend = figures.many_attend;
  return {
      {"document_tokens", put.token_count},
      {"codec", options.codec},
      {"prefill_seconds", put.prefill_seconds},
      {"put_seconds", put.total_seconds},
      {"first_token_after_sealed_seconds", put.first_token_after_sealed_seconds},
      {"one_agent_pool_seconds", first_token_seconds(figures.one_decode).front()},
      {"one_agent_attend_seconds", first_token_seconds(figures.one_attend).front()},
      {"one_agent_alone_seconds", first_token_seconds(figures.one_alone).front()},
      {"token_ms", median_token_ms(figures.one_decode)},
      {"attend_token_ms", median_token_ms(figures.one_attend)},
      {"short_token_ms", median_token_ms(figures.one_short)},
      {"agents", options.agent_count},
      {"agents_pool_seconds", first_token_seconds(figures.many_decode)},
      {"agents_attend_seconds", first_token_seconds(attend)},
      {"agents_alone_seconds", figures.all_alone_seconds},
      {"agents_alone_measured", options.measure_all_alone},
      {"answers_equal", comparison.equal},
      {"answers_near_tie", comparison.near_ties},
      {"answers_different", comparison.different},
      {"stored_bytes", put.stored_bytes},
      {"bf16_bytes", put.bf16_bytes},
      {"pss_sum_bytes", attend.mappings.pss_bytes},
      {"pool_private_bytes", attend.mappings.private_bytes},
      {"one_mapping_bytes", attend.one_mapping_bytes},
      {"attend_tokens", options.attend_tokens},
      {"decode_growth_bytes", figures.many_decode.private_growth_bytes},
      {"attend_growth_bytes", attend.private_growth_bytes},
      {"short_growth_bytes", figures.many_short.private_growth_bytes},
      {"answers", figures.many_decode.answers},
  };
}

Status write_json(const std::string& path, const nlohmann::json& report) {
  if (path.empty()) return Status::ok();
  std::ofstream file(path);
  file << report.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  if (!file.flush())
    return {POLYKV_ERR_SYSTEM, "write '" + path + "': failed; check the path and the disk"};
  return Status::ok();
}

/// Agents of both kinds map the pool once, and together hold one mapping of it.
Status check_mappings(const PutResult& put, const Batch& batch) {
  if (batch.one_mapping_bytes != put.stored_bytes) {
    return {POLYKV_ERR_INTERNAL, format("measure: an agent maps %llu bytes of a pool of %llu",
                                        static_cast<unsigned long long>(batch.one_mapping_bytes),
                                        static_cast<unsigned long long>(put.stored_bytes))};
  }
  const double ratio = pss_ratio(batch);
  if (ratio >= 0.98 && ratio <= 1.02) return Status::ok();
  return {POLYKV_ERR_INTERNAL,
          format("measure: the agents hold %.3f times one mapping; is somebody else holding it?",
                 ratio)};
}

}  // namespace

Status run_agents(const RunOptions& options) {
  std::printf("1. The model's weights, once for all agents: %s\n", options.weights_path.c_str());
  POLYKV_RETURN_IF_ERROR(
      prepare_weights(options.model_path, options.weights_path, options.thread_count));
  Figures figures;
  POLYKV_RETURN_IF_ERROR(put(options, figures));
  POLYKV_RETURN_IF_ERROR(run_one(options, figures));
  POLYKV_RETURN_IF_ERROR(run_many(options, figures));
  print_memory(options, figures);
  POLYKV_RETURN_IF_ERROR(write_json(options.json_path, to_json(options, figures)));
  POLYKV_RETURN_IF_ERROR(check_mappings(figures.put, figures.many_decode));
  return check_mappings(figures.put, figures.many_attend);
}

}  // namespace polykv::example
