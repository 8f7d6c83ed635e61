#include "examples/fifteen_agents/batch.h"

#include <algorithm>

namespace polykv::example {

std::vector<std::string> agent_arguments(const RunOptions& options, const Task& task) {
  std::vector<std::string> words = {"agent",
                                    "--model",
                                    options.model_path,
                                    "--weights",
                                    options.weights_path,
                                    "--max-tokens",
                                    std::to_string(task.max_tokens),
                                    "--threads",
                                    std::to_string(task.thread_count)};
  if (!options.socket_path.empty()) words.insert(words.end(), {"--socket", options.socket_path});
  if (task.document_name.empty()) {
    words.insert(words.end(), {"--document", options.document_path});
  } else {
    words.insert(words.end(), {"--name", task.document_name, "--read",
                               task.read == Read::attend ? "attend" : "decode"});
  }
  if (task.ignore_end) words.emplace_back("--ignore-end");
  words.emplace_back("--questions");
  for (const uint32_t question : task.questions) words.push_back(std::to_string(question));
  return words;
}

Result<Batch> run_batch(const RunOptions& options, const std::vector<Task>& tasks) {
  std::vector<AgentProcess> agents;
  for (const Task& task : tasks) {
    POLYKV_ASSIGN_OR_RETURN(AgentProcess agent,
                            AgentProcess::start(agent_arguments(options, task)));
    agents.push_back(std::move(agent));
  }
  for (AgentProcess& agent : agents) POLYKV_RETURN_IF_ERROR(agent.expect("ready").status());
  std::vector<uint64_t> before;
  for (const AgentProcess& agent : agents) {
    POLYKV_ASSIGN_OR_RETURN(const uint64_t bytes, private_bytes(agent.pid()));
    before.push_back(bytes);
  }
  for (AgentProcess& agent : agents) POLYKV_RETURN_IF_ERROR(agent.tell("go"));
  Batch batch;
  for (size_t i = 0; i < agents.size(); ++i) {
    for (size_t question = 0; question < tasks[i].questions.size(); ++question) {
      POLYKV_ASSIGN_OR_RETURN(nlohmann::json answer, agents[i].expect("answer"));
      batch.answers.push_back(std::move(answer));
    }
    POLYKV_RETURN_IF_ERROR(agents[i].expect("holding").status());
  }
  for (size_t i = 0; i < agents.size(); ++i) {
    POLYKV_ASSIGN_OR_RETURN(const PoolMappings one, pool_mappings(agents[i].pid()));
    batch.mappings.size_bytes += one.size_bytes;
    batch.mappings.rss_bytes += one.rss_bytes;
    batch.mappings.pss_bytes += one.pss_bytes;
    batch.mappings.private_bytes += one.private_bytes;
    batch.one_mapping_bytes = std::max(batch.one_mapping_bytes, one.size_bytes);
    POLYKV_ASSIGN_OR_RETURN(const uint64_t after, private_bytes(agents[i].pid()));
    batch.private_growth_bytes.push_back(static_cast<int64_t>(after) -
                                         static_cast<int64_t>(before[i]));
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

double median_token_ms(const Batch& batch) {
  std::vector<double> all;
  for (const nlohmann::json& answer : batch.answers) {
    for (const nlohmann::json& ms : answer["token_ms"]) all.push_back(ms);
  }
  std::sort(all.begin(), all.end());
  return all.empty() ? 0 : all[all.size() / 2];
}

int64_t largest_growth_bytes(const Batch& batch) {
  return *std::max_element(batch.private_growth_bytes.begin(), batch.private_growth_bytes.end());
}

Comparison compare(const Batch& batch, const Batch& reference, double near_tie) {
  Comparison comparison;
  for (size_t i = 0; i < batch.answers.size(); ++i) {
    const std::vector<uint32_t> a = batch.answers[i]["ids"];
    const std::vector<uint32_t> b = reference.answers[i]["ids"];
    const size_t count = std::min(a.size(), b.size());
    const auto position = static_cast<size_t>(
        std::mismatch(a.begin(), a.begin() + count, b.begin()).first - a.begin());
    if (position == count)
      ++comparison.equal;
    else if (reference.answers[i]["gaps"][position].get<double>() <= near_tie)
      ++comparison.near_ties;
    else
      ++comparison.different;
  }
  return comparison;
}

}  // namespace polykv::example
