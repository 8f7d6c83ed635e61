// Some agent processes that begin together and hold the document until all of them are measured.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/result.h"
#include "examples/fifteen_agents/agent.h"
#include "examples/fifteen_agents/agent_process.h"
#include "examples/fifteen_agents/driver.h"

namespace polykv::example {

/// What an agent is asked to do, beside what is in RunOptions.
struct Task {
  std::string document_name;  // in the pool; empty: the agent prefills the text itself
  Read read = Read::decode;
  uint32_t thread_count = 1;
  uint32_t max_tokens = 32;
  bool ignore_end = false;
  std::vector<uint32_t> questions;
};
std::vector<std::string> agent_arguments(const RunOptions& options, const Task& task);

struct Batch {
  std::vector<nlohmann::json> answers;  // one line per agent and question
  PoolMappings mappings;                // sum over all agents, while all hold the document
  uint64_t one_mapping_bytes = 0;
  /// Of each agent: what its private pages, of whatever mapping, grew by from before it attached until all had answered.
  std::vector<int64_t> private_growth_bytes;
};

/// Starts the agents, lets them begin together, reads their answers and, while all still hold the document, what the kernel
/// says about their memory.
Result<Batch> run_batch(const RunOptions& options, const std::vector<Task>& tasks);

std::vector<double> first_token_seconds(const Batch& batch);  // ascending
/// What a token after the first took, over all agents; 0 when no answer had a second.
double median_token_ms(const Batch& batch);
int64_t largest_growth_bytes(const Batch& batch);

/// Answers of two runs over the same questions, compared as far as the shorter ones go.
struct Comparison {
  uint32_t equal = 0;
  uint32_t near_ties = 0;  // the first difference is where the two best logits are that close
  uint32_t different = 0;
};
Comparison compare(const Batch& batch, const Batch& reference, double near_tie);

}  // namespace polykv::example
