// What the catalog's operations cost with few and with many segments, each with the packet that answers it:
// no sockets, and segments without memory behind them. Each document has one segment of 300 tokens.
//
//   catalog_bench [many]        default: 100000, against 1000 in the same run
//
// Every operation's result is checked; a wrong one ends the run. Medians.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "daemon/document_wire.h"
#include "daemon/documents.h"

using namespace polykv;
using namespace polykv::daemon;

namespace {

constexpr int kRounds = 5;
constexpr size_t kOperations = 2000;  // of a round
constexpr size_t kColdOperations = 300;
constexpr size_t kSweepBytes = size_t{64} << 20;
constexpr uint64_t kTokens = 300;
constexpr Domain kUser = 1000;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "catalog_bench: wrong result: %s\n", what);
  std::exit(1);
}

class Bench {
 public:
  explicit Bench(size_t count) {
    for (size_t i = 0; i < count; ++i) publish(static_cast<uint32_t>(i));
  }

  std::shared_ptr<Document> new_document(uint32_t number, uint64_t token_count = kTokens) {
    auto tokens = std::make_shared<std::vector<uint32_t>>(token_count, 1);
    (*tokens)[0] = number;
    auto document = std::make_shared<Document>();
    document->serial = catalog_.next_serial();
    document->identity = catalog_.share_identity(root_, smollm2_);
    document->root = root_;
    document->chain =
        std::make_shared<const std::vector<Digest>>(chain_digests(document->root, *tokens));
    document->tokens = std::move(tokens);
    document->key = {kUser, document->chain->back(), Profile::k8v8};
    return document;
  }

  void publish(uint32_t number) {
    const auto document = new_document(number);
    auto segment = segments_.reserve(0, kTokens, 4096);
    segments_.fill(*segment, nullptr);
    segments_.seal(*segment, UniqueFd());
    catalog_.append(*document, segment, *document->chain, true);
    catalog_.add(document);
    require(catalog_.give_name(*document, "document " + std::to_string(number), false, 4).is_ok(),
            "naming");
    documents_.push_back(document);
  }

  void acquire_by_name(size_t i) {
    Selector selector;
    selector.name = "document " + std::to_string(i);
    use(catalog_.find(kUser, selector), i);
  }
  void acquire_by_tokens(size_t i) {
    Selector selector;
    selector.tokens = documents_[i]->tokens;
    selector.digest = chain_digests(root_, *selector.tokens).back();
    selector.profile = Profile::k8v8;
    use(catalog_.find(kUser, selector), i);
  }
  void find_prefix(const Document& longer, size_t i) {
    const auto parts = catalog_.prefixes().longest(kUser, Profile::k8v8, longer.root,
                                                   {*longer.tokens, *longer.chain});
    require(parts.size() == 1 && parts[0].segment == documents_[i]->parts[0].segment &&
                parts[0].token_count == kChunkTokens,
            "prefix");
  }
  void list_page(size_t i) {
    const auto page = catalog_.list(kUser, documents_[i]->serial - 1, 64);
    require(!page.empty() && page[0] == documents_[i], "listing");
    flatbuffers::FlatBufferBuilder builder;
    std::vector<flatbuffers::Offset<wire::DocumentInfo>> infos;
    for (const auto& document : page) infos.push_back(document_info(builder, *document));
    builder.Finish(wire::CreateListingDirect(builder, &infos, 0));
    require(builder.GetSize() > 64, "listing");
  }
  /// Evicts the least recently used, and publishes it anew, so that there are as many as before.
  void evict_one() {
    const auto evictions = catalog_.choose_evictions({4096, 1});
    require(evictions.documents.size() == 1, "eviction");
    const std::shared_ptr<Document> document = evictions.documents[0];
    const uint32_t number = document->tokens->front();
    catalog_.retire(*document);
    publish(number);
    documents_[number] = documents_.back();
    documents_.pop_back();
  }

  size_t size() const { return documents_.size(); }

 private:
  void use(const std::shared_ptr<Document>& found, size_t i) {
    require(found == documents_[i], "acquire");
    catalog_.lease(*found);
    segments_.hold(process_, found->parts[0].segment);
    flatbuffers::FlatBufferBuilder builder;
    const wire::Handle handle(1, 2, 3);
    builder.Finish(wire::CreateLeaseGranted(builder, &handle, document_info(builder, *found), 1));
    require(builder.GetSize() > 64, "acquire");
    segments_.release(process_, *found->parts[0].segment);
    catalog_.end_lease(*found);
  }

  static ModelIdentity smollm2() {
    ModelIdentity identity;
    identity.name = "SmolLM2-135M-Instruct";
    identity.fingerprint[0] = 1;
    identity.layers.assign(30, {3, 64, 64, 0});
    return identity;
  }

  const ModelIdentity smollm2_ = smollm2();
  const Digest root_ = chain_root(smollm2_);
  Segments segments_;
  Process process_;
  Catalog catalog_{segments_};
  std::vector<std::shared_ptr<Document>> documents_;  // by number
};

/// Pushes everything else out of the processor's caches.
void sweep_caches() {
  static std::vector<uint64_t> memory(kSweepBytes / sizeof(uint64_t));
  for (size_t i = 0; i < memory.size(); i += 8) ++memory[i];
}

struct Cost {
  double warm_ns = 0;  // one after the other
  double cold_ns = 0;  // each after somebody else used the caches, as between a daemon's requests
};

Cost median_ns(const std::function<void()>& operation) {
  using Clock = std::chrono::steady_clock;
  using Nanoseconds = std::chrono::duration<double, std::nano>;
  std::vector<double> warm;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = Clock::now();
    for (size_t i = 0; i < kOperations; ++i) operation();
    warm.push_back(Nanoseconds(Clock::now() - start).count() / kOperations);
  }
  std::vector<double> cold;
  for (size_t i = 0; i < kColdOperations; ++i) {
    sweep_caches();
    const auto start = Clock::now();
    operation();
    cold.push_back(Nanoseconds(Clock::now() - start).count());
  }
  std::sort(warm.begin(), warm.end());
  std::sort(cold.begin(), cold.end());
  return {warm[warm.size() / 2], cold[cold.size() / 2]};
}

std::vector<Cost> measure(size_t count) {
  Bench bench(count);
  std::mt19937 random(1);
  const auto any = [&] { return random() % bench.size(); };
  std::vector<std::shared_ptr<Document>> longer;
  for (size_t i = 0; i < std::min<size_t>(count, 1000); ++i)
    longer.push_back(bench.new_document(static_cast<uint32_t>(i * (count / 1000)), 600));
  return {median_ns([&] { bench.acquire_by_name(any()); }),
          median_ns([&] { bench.acquire_by_tokens(any()); }), median_ns([&] {
            const size_t i = random() % longer.size();
            bench.find_prefix(*longer[i], i * (count / 1000));
          }),
          median_ns([&] { bench.list_page(any()); }), median_ns([&] { bench.evict_one(); })};
}

}  // namespace

int main(int argument_count, char** arguments) {
  const size_t many = argument_count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 100'000;
  constexpr size_t kFew = 1000;
  if (many < kFew) {
    std::fprintf(stderr, "usage: catalog_bench [many], at least %zu\n", kFew);
    return 2;
  }
  const std::vector<Cost> few = measure(kFew);
  const std::vector<Cost> lots = measure(many);
  const char* const names[] = {"acquire by name, release", "acquire by tokens, release",
                               "longest prefix of 600 tokens", "ls, a page of 64",
                               "evict one, publish one"};
  std::printf("%-30s %10s %10s %7s %10s %10s %7s\n", "", "cold", "cold", "", "warm", "warm", "");
  std::printf("%-30s %10zu %10zu %7s %10zu %10zu %7s\n", "segments", kFew, many, "ratio", kFew,
              many, "ratio");
  for (size_t i = 0; i < few.size(); ++i) {
    std::printf("%-30s %7.1f us %7.1f us %7.2f %7.1f us %7.1f us %7.2f\n", names[i],
                few[i].cold_ns / 1e3, lots[i].cold_ns / 1e3, lots[i].cold_ns / few[i].cold_ns,
                few[i].warm_ns / 1e3, lots[i].warm_ns / 1e3, lots[i].warm_ns / few[i].warm_ns);
  }
}
