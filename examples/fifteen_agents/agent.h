// One agent process: a model of its own (weights mapped from the shared cache file), a KV cache of
// its own, and a document that it decodes from the pool, attends to in the pool, or prefills by itself.
//
// It speaks lines of JSON on standard output, and is told to go on by lines on standard input, so
// that a driver can let many begin at once and hold them while it measures:
//   agent -> {"event":"ready"}                     weights mapped and touched
//   driver -> "go"
//   agent -> {"event":"answer", ...}               one for each question
//   agent -> {"event":"holding"}                   lease and cache still held
//   driver -> "exit"                               (or end of file)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/result.h"

namespace polykv::example {

enum class Read {
  decode,  // into the agent's own cache, once
  attend   // in place, at each token; the agent's own cache holds only what follows the document
};

struct AgentOptions {
  std::string socket_path;  // empty: the usual places
  std::string model_path;
  std::string weights_path;         // cache file made by prepare_weights
  std::string document_name;        // in the pool; empty: no pool
  std::string document_path;        // text file that the agent prefills itself; empty: pool
  std::vector<uint32_t> questions;  // indices into kQuestions
  Read read = Read::decode;         // of a document in the pool
  uint32_t max_tokens = 32;
  bool ignore_end = false;  // an answer always has max_tokens
  uint32_t thread_count = 1;
};

/// Dequantises the model into the weights cache file unless a valid one is there.
Status prepare_weights(const std::string& model_path, const std::string& weights_path,
                       uint32_t thread_count);

/// Runs the protocol above. A failure is also told as {"event":"error", "message": ...}.
Status run_agent(const AgentOptions& options);

}  // namespace polykv::example
