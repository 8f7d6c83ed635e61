// What it costs a model that new tokens were computed behind a decoded prefix instead of an exact one.
//
//   POLYKV_TEST_MODEL=model.gguf prefix_bench [following tokens]        default: 128
//
// GPL-3: a prefix of 5,120 tokens is encoded; a tail of 1,880 tokens is computed behind it and encoded
// as well; an agent decodes both and reads the tokens that follow. Printed is the Kullback-Leibler
// divergence of its next-token distributions from those of an agent whose whole cache is exact.
//
//   decoded     the tail attends to the decoded prefix: what polykv does by default
//   recomputed  the tail attends to the exact prefix: --recompute-prefix
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "daemon/prefill/model/model.h"
#include "daemon/prefill/model/tokenizer.h"
#include "daemon/prefill/transformer/transformer.h"
#include "tests/support/model.h"
#include "tests/support/segments.h"

using namespace polykv;

namespace {

constexpr uint32_t kPrefix = 5120;
constexpr uint32_t kTail = 1880;

void require(const Status& status) {
  if (status.is_ok()) return;
  std::fprintf(stderr, "prefix_bench: %s\n", status.message().c_str());
  std::exit(1);
}

/// Tokens [first, first + count) of the cache become what a segment of theirs decodes to.
void pass_through_codec(KvCache& cache, const ModelIdentity& identity, Profile profile,
                        uint32_t first, uint32_t count) {
  SegmentSpec spec;
  spec.identity = identity;
  spec.profile = profile;
  // A profile of one segment has no other place; its codec does not look at it.
  spec.first_token = is_shareable(profile) ? first : 0;
  spec.token_count = count;
  spec.digest_count = segment_digest_count(spec.first_token, count, true);
  test::AlignedBytes bytes(segment_size_bytes(spec).value());
  const std::vector<uint32_t> ids = test::test_ids(count);
  const std::vector<Digest> digests(spec.digest_count);
  const SegmentContents contents{ids, chain_root(identity), digests, PrefixTreatment::none};
  SegmentWriter writer = SegmentWriter::create(spec, contents, bytes.span()).value();
  const Strides strides{static_cast<int64_t>(cache.head_stride()),
                        static_cast<int64_t>(cache.token_stride()), 1};
  const size_t offset = first * cache.token_stride();
  for (uint32_t layer = 0; layer < cache.layer_count(); ++layer) {
    require(writer.encode_layer(
        layer, {Dtype::f32, cache.k(layer) + offset, strides, cache.v(layer) + offset, strides}));
  }
  require(writer.finish());
  const SegmentView view = SegmentView::open(bytes.span()).value();
  for (uint32_t layer = 0; layer < cache.layer_count(); ++layer) {
    DecodeTarget target;
    target.token_count = count;
    target.k = cache.k(layer) + offset;
    target.v = cache.v(layer) + offset;
    target.k_strides = target.v_strides = strides;
    require(decode_layer(view, layer, target));
  }
}

/// Logarithms of probabilities, [token, vocabulary].
std::vector<std::vector<float>> read_on(Transformer& transformer, KvCache& cache,
                                        std::span<const uint32_t> ids) {
  std::vector<std::vector<float>> result;
  for (size_t i = 0; i < ids.size(); ++i) {
    std::vector<float> logits(transformer.config().vocab_size);
    require(transformer.forward(ids.subspan(i, 1), cache, logits));
    const float maximum = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit - maximum));
    const auto shift = static_cast<float>(maximum + std::log(sum));
    for (float& logit : logits) logit -= shift;
    result.push_back(std::move(logits));
  }
  return result;
}

void report(const char* profile, const char* prefix, const std::vector<std::vector<float>>& exact,
            const std::vector<std::vector<float>>& got) {
  std::vector<double> divergences;
  size_t same_first = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    double divergence = 0;
    for (size_t id = 0; id < exact[i].size(); ++id) {
      divergence += std::exp(static_cast<double>(exact[i][id])) *
                    (static_cast<double>(exact[i][id]) - static_cast<double>(got[i][id]));
    }
    divergences.push_back(divergence);
    same_first += argmax(exact[i]) == argmax(got[i]) ? 1 : 0;
  }
  double mean = 0;
  for (const double divergence : divergences)
    mean += divergence / static_cast<double>(divergences.size());
  std::sort(divergences.begin(), divergences.end());
  std::printf("%-11s %-11s %12.3e %12.3e %12.3e %8.1f %%\n", profile, prefix, mean,
              divergences[divergences.size() / 2], divergences.back(),
              100.0 * static_cast<double>(same_first) / static_cast<double>(exact.size()));
}

}  // namespace

int main(int argument_count, char** arguments) {
  const size_t following = argument_count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 128;
  set_thread_count(std::max(1U, std::thread::hardware_concurrency()));
  const UniqueFd file = test::open_file(test::model_path_or_skip());
  const Model model = Model::open(file.get(), "SmolLM2").value();
  Transformer transformer(std::make_shared<const Weights>(
      Weights::load(model, std::thread::hardware_concurrency()).value()));
  const ModelIdentity identity = model_identity(model.config(), Digest{});
  const std::vector<uint32_t> ids =
      Tokenizer::from_gguf(model.gguf()).value().encode(test::read_file(test::kGpl3Path)).value();
  const std::span<const uint32_t> all(ids);
  if (following == 0 || kPrefix + kTail + following > ids.size()) {
    std::fprintf(stderr, "usage: prefix_bench [1 .. %zu]\n", ids.size() - kPrefix - kTail);
    return 2;
  }
  const auto next = all.subspan(kPrefix + kTail, following);
  const auto new_cache = [&] {
    return KvCache::create(model.config(), static_cast<uint32_t>(ids.size())).value();
  };
  KvCache exact = new_cache();
  require(transformer.forward(all.first(kPrefix + kTail), exact, {}));
  const auto expected = read_on(transformer, exact, next);
  std::printf("%zu tokens behind %u + %u; divergence from an exact cache, in nats\n", following,
              kPrefix, kTail);
  std::printf("%-11s %-11s %12s %12s %12s %10s\n", "profile", "prefix", "mean", "median", "worst",
              "same first");
  const auto copy_tokens = [&](KvCache& to, uint32_t count) {
    const size_t floats = count * to.token_stride();
    for (uint32_t layer = 0; layer < to.layer_count(); ++layer) {
      for (uint32_t head = 0; head < to.kv_head_count(); ++head) {
        const size_t at = head * to.head_stride();
        std::copy_n(exact.k(layer) + at, floats, to.k(layer) + at);
        std::copy_n(exact.v(layer) + at, floats, to.v(layer) + at);
      }
    }
    to.set_token_count(count);
  };
  for (const Profile profile : test::kAllProfiles) {
    KvCache cache = new_cache();
    copy_tokens(cache, kPrefix);
    pass_through_codec(cache, identity, profile, 0, kPrefix);
    require(transformer.forward(all.subspan(kPrefix, kTail), cache, {}));
    pass_through_codec(cache, identity, profile, kPrefix, kTail);
    report(profile_name(profile), "decoded", expected, read_on(transformer, cache, next));
    copy_tokens(cache, kPrefix + kTail);
    pass_through_codec(cache, identity, profile, 0, kPrefix);
    pass_through_codec(cache, identity, profile, kPrefix, kTail);
    report(profile_name(profile), "recomputed", expected, read_on(transformer, cache, next));
  }
}
