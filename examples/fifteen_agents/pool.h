// What an agent program does with polykv: connect, acquire a document, and decode it into its own KV
// cache or attend to it in place. The C ABI, used from C++ with two small owners.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/transformer/kv_cache.h"
#include "daemon/prefill/transformer/prefix.h"
#include "include/internal/geometry.h"
#include "polykv/polykv.h"

namespace polykv::example {

struct SessionCloser {
  void operator()(polykv_session* session) const { polykv_session_close(session); }
};
struct LeaseReleaser {
  void operator()(polykv_lease* lease) const { polykv_lease_release(lease); }
};
using SessionHandle = std::unique_ptr<polykv_session, SessionCloser>;
using LeaseHandle = std::unique_ptr<polykv_lease, LeaseReleaser>;

/// The status of a call with the library's message for it.
Status check(polykv_status status);

Result<SessionHandle> connect(const std::string& socket_path);
/// Waits for a document that is being produced, but only for its first segment.
Result<LeaseHandle> acquire(polykv_session* session, const std::string& name);

/// Refuses a document that another model computed, whose KV would be garbage to this one, and one whose layers have another
/// shape or a sliding window, which the agent's model code does not compute.
Status require_model(const polykv_lease* lease, const ModelIdentity& identity);

/// Decodes the document into the cache (fp32, layers spread over `thread_count` threads), segment by
/// segment as they are sealed, and sets its token count. Returns when the last of it could be read.
Result<std::chrono::steady_clock::time_point> decode_into(polykv_lease* lease, KvCache& cache,
                                                          uint32_t thread_count);

/// The document as what comes before an agent's own cache. Thread-safe.
class PooledPrefix final : public Prefix {
 public:
  /// Returns when all of the document can be read. Borrows the lease.
  static Result<PooledPrefix> wait_for(polykv_lease* lease);

  uint32_t token_count() const override { return token_count_; }
  Status attend(const PrefixQueries& queries, float* output, float* log_sum_exp) const override;

 private:
  PooledPrefix(const polykv_lease* lease, uint32_t token_count, uint32_t head_dim)
      : lease_(lease), token_count_(token_count), head_dim_(head_dim) {}

  const polykv_lease* lease_;
  uint32_t token_count_;
  uint32_t head_dim_;
};

}  // namespace polykv::example
