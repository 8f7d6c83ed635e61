// The driver's own part with the pool: documents are put there.
#pragma once

#include <cstdint>
#include <functional>

#include "common/result.h"
#include "examples/fifteen_agents/driver.h"

namespace polykv::example {

struct PutResult {
  double prefill_seconds = 0;  // 0: it was there already
  double total_seconds = 0;    // worker start, loading the model, tokenizing, prefill, encoding
  uint64_t token_count = 0;
  uint64_t stored_bytes = 0;
  uint64_t bf16_bytes = 0;
  double first_token_after_sealed_seconds = 0;  // of an agent that read it meanwhile
};

/// The text of options.document_path, behind the head of the model's chat template.
Result<PutResult> put_document(const RunOptions& options,
                               std::function<void()> on_prefill_start = {});

/// The first tokens of the document that options names, as a document of its own.
Status put_beginning(const RunOptions& options, uint32_t token_count, const std::string& name);

}  // namespace polykv::example
