#include "daemon/prefill/eval/cache_codec.h"

#include <cassert>
#include <cstdlib>
#include <utility>

#include "common/digest.h"
#include "kernels/segment.h"

namespace polykv::eval {

namespace {

Strides strides_of(const KvCache& cache) {
  return {static_cast<int64_t>(cache.head_stride()), static_cast<int64_t>(cache.token_stride()), 1};
}

/// How a producer would encode each layer.
Result<std::vector<LayerChoice>> examine(const Method& method, const ModelIdentity& identity,
                                         const KvCache& source, const LastQueries& queries,
                                         uint32_t token_count) {
  std::vector<LayerChoice> choices;
  for (uint32_t layer = 0; layer < source.layer_count(); ++layer) {
    const Strides strides = strides_of(source);
    POLYKV_ASSIGN_OR_RETURN(
        LayerChoice choice,
        examine_layer(
            {identity.layers[layer], identity.source_dtype, method.profile, 0, token_count},
            {Dtype::f32, source.k(layer), strides, source.v(layer), strides},
            queries.of(layer, 0)));
    choices.push_back(std::move(choice));
  }
  return choices;
}

/// The document as one segment: encoded, and decoded unless it goes to `packed`. Gives its bytes.
Result<uint64_t> pass_through_segment(const Method& method, const ModelIdentity& identity,
                                      const KvCache& source, std::span<const LayerChoice> choices,
                                      uint32_t token_count, KvCache& target,
                                      std::optional<SegmentPrefix>* packed) {
  SegmentSpec spec;
  spec.identity = identity;
  spec.profile = method.profile;
  spec.token_count = token_count;
  spec.digest_count = segment_digest_count(0, token_count, true);
  apply_choices(choices, spec);
  POLYKV_ASSIGN_OR_RETURN(const uint64_t size_bytes, segment_size_bytes(spec));
  SegmentBytes bytes(static_cast<uint8_t*>(std::aligned_alloc(kSegmentPageBytes, size_bytes)));
  if (bytes == nullptr) {
    return {POLYKV_ERR_NO_MEMORY, format("no memory for a segment of %llu bytes",
                                         static_cast<unsigned long long>(size_bytes))};
  }
  // Neither ids nor digests matter to K and V.
  const std::vector<uint32_t> ids(token_count);
  const std::vector<Digest> digests(spec.digest_count);
  POLYKV_ASSIGN_OR_RETURN(
      SegmentWriter writer,
      SegmentWriter::create(spec, {ids, chain_root(identity), digests, PrefixTreatment::none},
                            {bytes.get(), size_bytes}));
  const Strides from = strides_of(source);
  for (uint32_t layer = 0; layer < source.layer_count(); ++layer) {
    POLYKV_RETURN_IF_ERROR(
        writer.encode_layer(layer, {Dtype::f32, source.k(layer), from, source.v(layer), from},
                            choices[layer].exact_tokens));
  }
  POLYKV_RETURN_IF_ERROR(writer.finish());
  POLYKV_ASSIGN_OR_RETURN(const SegmentView view, SegmentView::open({bytes.get(), size_bytes}));
  if (packed != nullptr) {
    packed->emplace(std::move(bytes), view);
    return size_bytes;
  }
  for (uint32_t layer = 0; layer < target.layer_count(); ++layer) {
    DecodeTarget decoded;
    decoded.token_count = token_count;
    decoded.k = target.k(layer);
    decoded.v = target.v(layer);
    decoded.k_strides = decoded.v_strides = strides_of(target);
    POLYKV_RETURN_IF_ERROR(decode_layer(view, layer, decoded));
  }
  return size_bytes;
}

void pass_through_baseline(const Baseline& baseline, const KvCache& source, uint32_t token_count,
                           KvCache& target) {
  // Rows of a head lie one after the other, in both caches.
  const auto values = static_cast<uint32_t>(token_count * source.token_stride());
  for (uint32_t layer = 0; layer < source.layer_count(); ++layer) {
    for (uint32_t head = 0; head < source.kv_head_count(); ++head) {
      const size_t from = head * source.head_stride();
      const size_t to = head * target.head_stride();
      pass_through(baseline, source.k(layer) + from, target.k(layer) + to, values);
      pass_through(baseline, source.v(layer) + from, target.v(layer) + to, values);
    }
  }
}

}  // namespace

Result<Method> method_from_name(const std::string& name) {
  if (const auto baseline = baseline_from_name(name)) return Method{name, Profile::any, baseline};
  const auto profile = profile_from_name(name);
  if (profile && (*profile == Profile::automatic || codec_for(*profile) != nullptr))
    return Method{name, *profile, std::nullopt};
  std::string known;
  for (const std::string& other : all_method_names()) known += (known.empty() ? "" : ", ") + other;
  return {POLYKV_ERR_INVALID_ARGUMENT,
          "profile '" + name + "' is unknown; there are exact, " + known};
}

std::vector<std::string> all_method_names() {
  return {"q8_0", "q5_0", "q4_0", "paper-k8v3", "k8v8", "k6v5", "k5v4", "k8v3", "k4v3", "auto"};
}

Result<PassedThrough> pass_through_method(const Method& method, const ModelIdentity& identity,
                                          const KvCache& source, const LastQueries& queries,
                                          uint32_t token_count, KvCache& target,
                                          std::optional<SegmentPrefix>* packed) {
  target.set_token_count(0);
  PassedThrough result;
  const uint64_t values =
      uint64_t{2} * source.layer_count() * source.kv_head_count() * source.head_dim() * token_count;
  if (method.baseline) {
    assert(packed == nullptr);
    if (source.head_dim() % kBaselineBlock != 0) {
      return {POLYKV_ERR_UNSUPPORTED,
              format("%s has blocks of %u values, head_dim %u is no multiple", method.name.c_str(),
                     kBaselineBlock, source.head_dim())};
    }
    pass_through_baseline(*method.baseline, source, token_count, target);
    result.stored_bytes =
        static_cast<uint64_t>(static_cast<double>(values) * method.baseline->bits_per_value / 8);
  } else {
    POLYKV_ASSIGN_OR_RETURN(result.layers, examine(method, identity, source, queries, token_count));
    POLYKV_ASSIGN_OR_RETURN(
        result.stored_bytes,
        pass_through_segment(method, identity, source, result.layers, token_count, target, packed));
  }
  result.bits_per_value =
      static_cast<double>(result.stored_bytes) * 8 / static_cast<double>(values);
  if (packed == nullptr) target.set_token_count(token_count);
  return result;
}

}  // namespace polykv::eval
