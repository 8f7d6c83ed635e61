// One document: from the text's descriptor to the sealed segments. One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/fd.h"
#include "common/result.h"
#include "daemon/prefill/worker/computer.h"
#include "daemon/prefill/worker/free_memory.h"
#include "daemon/prefill/worker/prefill_model.h"
#include "kernels/codec.h"
#include "libclient/publisher.h"
#include "libclient/session.h"
#include "polykv/polykv.h"

namespace polykv {

struct JobLimits {
  uint32_t thread_count = 1;
  uint64_t memory_bytes = 0;  // 0: only what the machine has free
  uint64_t text_bytes = uint64_t{64} << 20;
};

struct JobResult {
  Status status;
  Digest digest{};  // of the document, once its tokens are known
  uint64_t prefilled_tokens = 0;
};

class Job {
 public:
  /// `start` is copied; everything else is borrowed. `fds`: as JobStart says.
  Job(std::shared_ptr<lib::Session> session, const PrefillModel& model, Computer& computer,
      const FreeMemory& free_memory, const JobLimits& limits, const wire::JobStart& start,
      std::vector<UniqueFd> fds);

  /// ERR_DAEMON_GONE and ERR_PROTOCOL in the result end the worker; everything else is the job's
  /// own affair.
  JobResult run();

 private:
  Status run_steps();
  Result<std::vector<uint32_t>> read_ids();
  Result<std::vector<uint32_t>> read_id_list();
  Status check_ids() const;
  /// Null when the document is there already.
  Result<std::shared_ptr<lib::Publisher>> acquire();
  Status check_memory(const DocumentSize& size) const;
  Status check_host_memory(const MemoryEstimate& estimate) const;
  Status load_weights(lib::Publisher& publisher);
  Status read_base();
  Status take_prefix(lib::Publisher& publisher, Computation& computation);
  Status prefill(lib::Publisher& publisher);
  uint64_t segment_end(const lib::Publisher& publisher) const;

  Status report(polykv_ingest_phase phase, uint64_t tokens_done);
  /// Reports, and looks for a cancellation: ERR_CANCELLED.
  Status keep_alive(polykv_ingest_phase phase, uint64_t tokens_done);
  bool is_cancelled();
  int64_t heartbeat_ms() const;

  std::shared_ptr<lib::Session> session_;
  const PrefillModel& model_;
  Computer& computer_;
  const FreeMemory& free_memory_;
  JobLimits limits_;

  uint64_t job_;
  Profile profile_;
  bool has_text_;
  uint64_t listed_token_count_;
  std::optional<Digest> extends_;
  bool recompute_prefix_;
  uint64_t control_group_free_bytes_;  // 0: not limited
  DocumentText how_;                   // without its texts
  UniqueFd input_;                     // text or token list
  UniqueFd before_;

  std::vector<uint32_t> ids_;
  uint64_t base_tokens_ = 0;  // of these, of the document that is extended
  uint64_t memory_bytes_ = 0;
  Status session_status_;  // why the connection is no use any more
  bool cancelled_ = false;
  JobResult result_;
};

}  // namespace polykv
