// The driver: puts a document, runs agent processes on it, and measures what the pool saves against
// "each agent alone".
#pragma once

#include <cstdint>
#include <string>

#include "common/result.h"

namespace polykv::example {

struct RunOptions {
  std::string socket_path;
  std::string model_path;
  std::string weights_path;
  std::string document_path;
  std::string document_name = "gpl3";
  std::string codec = "k5v4";
  uint32_t agent_count = 15;
  uint32_t max_tokens = 32;     // of an answer
  uint32_t attend_tokens = 64;  // that each agent goes on to while its memory is measured
  uint32_t thread_count = 1;
  bool measure_all_alone = false;  // run the agents without the pool for real, instead of
                                   // multiplying one by their number
  std::string json_path;           // empty: no JSON
};

/// Prints the report on standard output. Fails when an agent fails, or when what was measured
/// contradicts itself (a pool mapped twice, answers of equal processes that differ).
Status run_agents(const RunOptions& options);

struct CompareOptions {
  RunOptions run;
  uint32_t question_count = 20;
  /// A first difference is allowed where the two best logits of the run compared with are this close.
  double near_tie = 1e-3;
};

/// Puts the document, lets an agent decode it and one attend to it, and compares the token ids of their answers; with `exact` also
/// with those of an agent without the pool. Prints the counts. ERR_INTERNAL when an answer differs elsewhere than at a near tie.
Status compare_answers(const CompareOptions& options);

}  // namespace polykv::example
