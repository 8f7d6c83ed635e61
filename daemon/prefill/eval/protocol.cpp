#include "daemon/prefill/eval/protocol.h"

#include <algorithm>
#include <optional>

#include "daemon/prefill/eval/hostile_keys.h"

namespace polykv::eval {

namespace {

Status check(const Protocol& protocol, std::span<const Method> methods, const ModelConfig& config,
             size_t token_count) {
  for (const Method& method : methods) {
    if (!protocol.attends || !method.baseline) continue;
    return {POLYKV_ERR_UNSUPPORTED,
            method.name + " has no packed form to attend to; leave it out, or decode"};
  }
  if (protocol.window_count == 0 || protocol.context_tokens == 0 || protocol.target_tokens == 0) {
    return {POLYKV_ERR_INVALID_ARGUMENT, "windows, context and targets are each at least 1"};
  }
  const uint64_t window = uint64_t{protocol.context_tokens} + protocol.target_tokens;
  if (window > config.context_length) {
    return {POLYKV_ERR_CONTEXT_EXCEEDED,
            format("context and targets are %llu tokens, the model's context %u",
                   static_cast<unsigned long long>(window), config.context_length)};
  }
  if (token_count < window + protocol.window_count) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("the text has %zu tokens; %u windows of %llu need more", token_count,
                   protocol.window_count, static_cast<unsigned long long>(window))};
  }
  return Status::ok();
}

/// Sums; finished by the number of windows.
void add(const PassedThrough& passed, MethodResult& result) {
  result.stored_bytes += static_cast<double>(passed.stored_bytes);
  result.bits_per_value += passed.bits_per_value;
  result.certificate.resize(passed.layers.size());
  for (size_t i = 0; i < passed.layers.size(); ++i) {
    const LayerChoice& layer = passed.layers[i];
    const double error = static_cast<double>(layer.certificate.relative_error);
    result.certificate[i] += error;
    result.certificate_worst = std::max(result.certificate_worst, error);
    ++result.layer_counts[layer.profile];
  }
}

}  // namespace

Result<std::vector<MethodResult>> run_protocol(const Protocol& protocol,
                                               const ModelIdentity& identity,
                                               Transformer& transformer,
                                               std::span<const uint32_t> ids,
                                               std::span<const Method> methods,
                                               uint32_t thread_count, const Progress& progress) {
  POLYKV_RETURN_IF_ERROR(check(protocol, methods, transformer.config(), ids.size()));
  const uint32_t window_tokens = protocol.context_tokens + protocol.target_tokens;
  POLYKV_ASSIGN_OR_RETURN(KvCache exact, KvCache::create(transformer.config(), window_tokens));
  POLYKV_ASSIGN_OR_RETURN(KvCache cache, KvCache::create(transformer.config(), window_tokens));
  std::vector<float> want(size_t{protocol.target_tokens} * transformer.config().vocab_size);
  std::vector<float> got(want.size());
  std::vector<MethodResult> results;
  for (const Method& method : methods) results.push_back({method, 0, 0, {}, {}, 0, {}});
  std::vector<std::vector<PositionScore>> scores(methods.size());
  LastQueries queries(transformer.config());
  HostileKeys hostile(transformer.config(), protocol.hostile_factor, protocol.context_tokens / 2);
  ForwardOptions model;  // what the model does beyond its weights
  if (protocol.hostile_factor != 0)
    model.before_rope = [&](const LayerRows& rows) { hostile.change(rows); };
  ForwardOptions prefill = model;
  prefill.after_rope = [&](const LayerRows& rows) { queries.keep(rows); };
  const size_t step = (ids.size() - window_tokens) / protocol.window_count;
  for (uint32_t window = 0; window < protocol.window_count; ++window) {
    const std::span<const uint32_t> tokens = ids.subspan(window * step, window_tokens + 1);
    const auto targets = tokens.subspan(protocol.context_tokens, protocol.target_tokens);
    const auto next_ids = tokens.subspan(protocol.context_tokens + 1, protocol.target_tokens);
    exact.set_token_count(0);
    POLYKV_RETURN_IF_ERROR(
        transformer.forward(tokens.first(protocol.context_tokens), exact, {}, prefill));
    POLYKV_RETURN_IF_ERROR(transformer.forward(targets, exact, want, model));
    for (size_t i = 0; i < methods.size(); ++i) {
      std::optional<SegmentPrefix> packed;
      POLYKV_ASSIGN_OR_RETURN(
          const PassedThrough passed,
          pass_through_method(methods[i], identity, exact, queries, protocol.context_tokens, cache,
                              protocol.attends ? &packed : nullptr));
      add(passed, results[i]);
      ForwardOptions forward = model;
      forward.prefix = packed ? &*packed : nullptr;
      POLYKV_RETURN_IF_ERROR(transformer.forward(targets, cache, got, forward));
      const auto found = score_positions(want, got, next_ids, thread_count);
      scores[i].insert(scores[i].end(), found.begin(), found.end());
      progress(window, methods[i]);
    }
  }
  for (size_t i = 0; i < methods.size(); ++i) {
    MethodResult& method = results[i];
    method.summary = summarise(scores[i]);
    method.stored_bytes /= protocol.window_count;
    method.bits_per_value /= protocol.window_count;
    for (double& error : method.certificate) error /= protocol.window_count;
  }
  return results;
}

}  // namespace polykv::eval
