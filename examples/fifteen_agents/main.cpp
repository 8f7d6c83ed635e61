// fifteen_agents: separate agent processes answer questions about one document.
//
//   fifteen_agents run      puts a document into a running polykvd, runs agents on it, prints times and memory
//   fifteen_agents compare  answers by both ways to read, and with `exact` without the pool, and compares token ids
//   fifteen_agents agent    one agent process, as `run` starts it (its protocol is in agent.h)
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <thread>

#include "common/command_line.h"
#include "daemon/prefill/transformer/transformer.h"
#include "examples/fifteen_agents/agent.h"
#include "examples/fifteen_agents/driver.h"
#include "examples/fifteen_agents/questions.h"

using namespace polykv;
using namespace polykv::example;

namespace {

void add_run_options(CLI::App& app, RunOptions& options) {
  app.add_option("--socket", options.socket_path, "polykvd's socket (default: the usual places)");
  app.add_option("--model", options.model_path, "GGUF file of a Llama-like instruct model")
      ->required();
  app.add_option("--weights", options.weights_path,
                 "cache file of the dequantised weights; made when missing")
      ->required();
  app.add_option("--document", options.document_path, "text file")->required();
  app.add_option("--name", options.document_name, "the document's name in the pool")
      ->capture_default_str();
  app.add_option("--codec", options.codec, "codec profile")->capture_default_str();
  app.add_option("--max-tokens", options.max_tokens, "tokens of an answer")->capture_default_str();
  app.add_option("--threads", options.thread_count, "threads of an agent that runs alone")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
}

int report(const Status& status) {
  if (status.is_ok()) return 0;
  std::fprintf(stderr, "fifteen_agents: %s\n", status.message().c_str());
  return status.code();
}

}  // namespace

int main(int argc, char** argv) {
  polykv::wait_passively(argv);
  CLI::App app("Agent processes that share one document through polykvd");
  app.require_subcommand(1);

  RunOptions run;
  CompareOptions compare;
  AgentOptions agent;
  const uint32_t cores = std::max(1U, std::thread::hardware_concurrency());
  run.thread_count = compare.run.thread_count = cores;

  CLI::App* run_command = app.add_subcommand("run", "put a document, run agents on it, measure");
  add_run_options(*run_command, run);
  run_command->add_option("--agents", run.agent_count, "agent processes at once")
      ->capture_default_str()
      ->check(CLI::Range(1, 256));
  run_command
      ->add_option("--attend-tokens", run.attend_tokens,
                   "tokens that each agent goes on to while its memory is measured")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  run_command->add_flag("--measure-all-alone", run.measure_all_alone,
                        "run them without the pool as well, instead of computing that time");
  run_command->add_option("--json", run.json_path, "write the figures there");

  CLI::App* compare_command =
      app.add_subcommand("compare", "compare answers by both ways to read a document");
  compare.run.codec = "exact";
  add_run_options(*compare_command, compare.run);
  compare_command
      ->add_option("--near-tie", compare.near_tie,
                   "answers may part where the two best logits are this close")
      ->capture_default_str();
  compare_command->add_option("--question-count", compare.question_count, "questions")
      ->capture_default_str()
      ->check(CLI::Range(size_t{1}, kQuestions.size()));

  CLI::App* agent_command = app.add_subcommand("agent", "one agent process");
  agent_command->add_option("--socket", agent.socket_path, "polykvd's socket");
  agent_command->add_option("--model", agent.model_path, "GGUF file")->required();
  agent_command->add_option("--weights", agent.weights_path, "weights cache file")->required();
  auto* name = agent_command->add_option("--name", agent.document_name, "document in the pool");
  agent_command
      ->add_option("--document", agent.document_path, "text file to prefill without the pool")
      ->excludes(name);
  agent_command
      ->add_option("--read", agent.read,
                   "a document in the pool: decode it, or attend to it in place")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Read>{{"decode", Read::decode}, {"attend", Read::attend}}))
      ->needs(name);
  agent_command->add_option("--max-tokens", agent.max_tokens, "tokens of an answer");
  agent_command->add_flag("--ignore-end", agent.ignore_end, "go on to --max-tokens in any case");
  agent_command->add_option("--threads", agent.thread_count, "threads")->check(CLI::Range(1, 1024));
  agent_command->add_option("--questions", agent.questions, "indices of questions")
      ->required()
      ->check(CLI::Range(size_t{0}, kQuestions.size() - 1));

  if (const auto code = parse_command_line(app, argc, argv)) return *code;
  if (run_command->parsed()) return report(run_agents(run));
  if (compare_command->parsed()) return report(compare_answers(compare));
  if (agent.document_name.empty() && agent.document_path.empty()) {
    return report(
        {POLYKV_ERR_INVALID_ARGUMENT, "agent: give --name (pool) or --document (no pool)"});
  }
  return report(run_agent(agent));
}
