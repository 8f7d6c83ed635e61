// A KV cache through a codec profile or a baseline: what an agent finds who decodes a document, or attends to it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/eval/attend_segment.h"
#include "daemon/prefill/eval/baselines.h"
#include "daemon/prefill/transformer/kv_cache.h"
#include "daemon/prefill/transformer/last_queries.h"
#include "include/internal/geometry.h"

namespace polykv::eval {

struct Method {
  std::string name;
  Profile profile = Profile::any;  // unless it is a baseline
  std::optional<Baseline> baseline;
};
/// POLYKV_ERR_INVALID_ARGUMENT names those that exist.
Result<Method> method_from_name(const std::string& name);
std::vector<std::string> all_method_names();

struct PassedThrough {
  uint64_t stored_bytes = 0;        // everything counted
  double bits_per_value = 0;        // these bytes, for each value of K and V
  std::vector<LayerChoice> layers;  // as a producer would have them; none of a baseline
};
/// The first `token_count` tokens of `source` as `method` keeps them, into `target`, whose token
/// count becomes that. `queries`: of the last of these tokens. With `packed`, for profiles alone, the target
/// stays empty, and the tokens are there instead as a model can attend to them.
Result<PassedThrough> pass_through_method(const Method& method, const ModelIdentity& identity,
                                          const KvCache& source, const LastQueries& queries,
                                          uint32_t token_count, KvCache& target,
                                          std::optional<SegmentPrefix>* packed = nullptr);

}  // namespace polykv::eval
