// The protocol: a text's windows are prefilled, their caches pass through each method, and the
// tokens that follow are scored with them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/eval/cache_codec.h"
#include "daemon/prefill/eval/divergence.h"
#include "daemon/prefill/transformer/transformer.h"

namespace polykv::eval {

struct Protocol {
  uint32_t window_count = 8;
  uint32_t context_tokens = 2048;  // prefilled and passed through the method, as one segment
  uint32_t target_tokens = 512;    // scored, with their own exact K and V
  bool attends = false;  // to the packed context, in place; otherwise the targets see it decoded
  double hostile_factor = 0;  // see HostileKeys; 0: the model as it is
};

struct MethodResult {
  Method method;
  double stored_bytes = 0;          // of a window's cache; the mean of the windows
  double bits_per_value = 0;        // of a cache, everything counted; the mean of the windows
  Summary summary;                  // over the targets of all windows
  std::vector<double> certificate;  // [layer]: relative errors, the mean of the windows; none of a
                                    // baseline
  double certificate_worst = 0;     // of any layer in any window
  std::map<Profile, uint32_t> layer_counts;  // with which profile; of all windows
};

/// Called after each method of each window.
using Progress = std::function<void(uint32_t window, const Method& method)>;

/// Window i of n begins at token i * floor((N - context - targets) / n). `ids` is the text's N
/// tokens; there has to be one behind the last target, which is scored there.
Result<std::vector<MethodResult>> run_protocol(const Protocol& protocol,
                                               const ModelIdentity& identity,
                                               Transformer& transformer,
                                               std::span<const uint32_t> ids,
                                               std::span<const Method> methods,
                                               uint32_t thread_count, const Progress& progress);

}  // namespace polykv::eval
