// Seconds of prefilling GPL-3 (7,639 tokens) with SmolLM2-135M, against what the same libtorch needs for the matrix
// products alone, in the same run. The last logits are compared with the reference before anything is timed.
//
//   POLYKV_TEST_MODEL=model.gguf prefill_bench [rounds = 3] [chunk = 512] [threads = all]
//
// The roofline takes each product's best measured rate: linear layers as [chunk, in] x [in, out]; attention's two products
// both in our tiles (one thread each, all threads busy) and as one large product on all threads, whichever is faster. It
// counts the products that causal attention needs, without the masked half of the diagonal tiles, which we compute too.
#include <omp.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <thread>

#include "daemon/prefill/transformer/blas.h"
#include "daemon/prefill/transformer/row_kernels.h"
#include "daemon/prefill/transformer/transformer.h"
#include "tests/support/model.h"
#include "tests/support/npy.h"

using namespace polykv;

namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// User and system time of all threads.
double cpu_s() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// The shortest of several runs, at least 5 and for at least `seconds`.
double best_s(double seconds, const std::function<void()>& work) {
  double best = 1e30;
  const double begin = now_s();
  for (int round = 0; round < 5 || now_s() - begin < seconds; ++round) {
    const double start = now_s();
    work();
    best = std::min(best, now_s() - start);
  }
  return best;
}

void print_machine(uint32_t thread_count) {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line) && line.find("model name") == std::string::npos) {
  }
  double load[3] = {0, 0, 0};
  if (getloadavg(load, 3) < 1) load[0] = -1;
  std::printf("machine: %s, %u threads used, load average %.1f\n",
              line.substr(line.find(':') + 2).c_str(), thread_count, load[0]);
  std::printf("BLAS: %s; row kernels: %s\n", blas_info().description.c_str(), row_kernels().name);
}

struct ProductClass {
  const char* name;
  double flops;  // of the whole prefill
  double rate;   // FLOP/s, measured
};

double linear_rate(int64_t rows, int64_t out, int64_t in) {
  const std::vector<float> x(static_cast<size_t>(rows * in), 0.5F);
  const std::vector<float> w(static_cast<size_t>(out * in), 0.25F);
  std::vector<float> y(static_cast<size_t>(rows * out));
  const double seconds = best_s(0.7, [&] {
    for (int i = 0; i < 8; ++i)
      multiply_transposed(x.data(), w.data(), y.data(), rows, out, in, Store::overwrite);
  });
  return 8 * 2.0 * static_cast<double>(rows * out * in) / seconds;
}

/// One of attention's products: queries x keys, or weights x values, with `keys` keys; `parallel` tiles at a time.
double attention_rate(bool is_scores, int64_t rows, int64_t dim, int64_t keys, int parallel) {
  std::vector<std::vector<float>> q(static_cast<size_t>(parallel));
  std::vector<std::vector<float>> scores(static_cast<size_t>(parallel));
  for (auto& tile : q) tile.assign(static_cast<size_t>(rows * dim), 0.5F);
  for (auto& tile : scores) tile.assign(static_cast<size_t>(rows * keys), 0.001F);
  const std::vector<float> cache(static_cast<size_t>(keys * dim), 0.25F);
  constexpr int kRepeats = 16;
  const auto one = [&](size_t at) {
    for (int i = 0; i < kRepeats; ++i) {
      if (is_scores) {
        multiply_transposed(q[at].data(), cache.data(), scores[at].data(), rows, keys, dim,
                            Store::overwrite);
      } else {
        multiply_add(scores[at].data(), cache.data(), q[at].data(), rows, dim, keys);
      }
    }
  };
  const double seconds = best_s(0.7, [&] {
    if (parallel == 1) return one(0);
#pragma omp parallel num_threads(parallel)
    {
      const BlasScope scope;
      one(static_cast<size_t>(omp_get_thread_num()));
    }
  });
  return kRepeats * parallel * 2.0 * static_cast<double>(rows * dim * keys) / seconds;
}

std::vector<ProductClass> product_classes(const ModelConfig& config, int64_t token_count,
                                          int64_t chunk, uint32_t thread_count) {
  const BlasScope scope;
  const auto embedding = static_cast<int64_t>(config.embedding_length);
  const auto hidden = static_cast<int64_t>(config.feed_forward_length);
  const int64_t dim = config.head_dim;
  const int64_t heads = dim * config.head_count;
  const int64_t qkv = heads + 2 * dim * config.kv_head_count;
  // The last layer is needed for K and V of all tokens, and else for the last token alone.
  const double layers = config.layer_count;
  const auto flops = [&](double layer_count, int64_t out, int64_t in) {
    return layer_count * 2.0 * static_cast<double>(token_count) * static_cast<double>(out * in);
  };
  const double causal = static_cast<double>(token_count) * static_cast<double>(token_count + 1) / 2;
  const double attention = (layers - 1) * 2.0 * causal * static_cast<double>(heads);
  const int64_t tile = 64 * config.group_size();
  const auto threads = static_cast<int>(thread_count);
  const auto best_attention = [&](bool is_scores) {
    return std::max(attention_rate(is_scores, tile, dim, 512, threads),
                    attention_rate(is_scores, tile, dim, 4096, 1));
  };
  return {
      {"Q, K, V", flops(layers, qkv, embedding), linear_rate(chunk, qkv, embedding)},
      {"attention output", flops(layers - 1, embedding, heads),
       linear_rate(chunk, embedding, heads)},
      {"gate and up", flops(layers - 1, 2 * hidden, embedding),
       linear_rate(chunk, 2 * hidden, embedding)},
      {"down", flops(layers - 1, embedding, hidden), linear_rate(chunk, embedding, hidden)},
      {"queries x keys", attention, best_attention(true)},
      {"weights x values", attention, best_attention(false)},
  };
}

double logits_error(const std::vector<float>& logits) {
  const auto expected =
      test::load_npy<float>(POLYKV_TEST_DATA_DIR "/smollm2/logits_last.npy", "<f4").values;
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(static_cast<double>(logits[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(difference / norm);
}

/// Milliseconds per call of forward() with `row_count` tokens behind the whole document.
void report_steps(Transformer& transformer, KvCache& cache, std::span<const uint32_t> ids,
                  uint32_t row_count) {
  std::vector<float> logits(transformer.config().vocab_size);
  const uint32_t cached = cache.token_count();
  std::vector<double> milliseconds;
  for (int i = 0; i < 15; ++i) {
    const double start = now_s();
    if (!transformer.forward(ids.first(row_count), cache, logits).is_ok()) std::abort();
    milliseconds.push_back((now_s() - start) * 1e3);
    cache.set_token_count(cached);
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  std::printf("%2u token(s) after %u cached: median %.1f ms (%.1f .. %.1f)\n", row_count, cached,
              milliseconds[milliseconds.size() / 2], milliseconds.front(), milliseconds.back());
}

}  // namespace

int main(int argc, char** argv) {
  wait_passively(argv);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 3;
  const auto chunk = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 512);
  const auto thread_count =
      argc > 3 ? static_cast<uint32_t>(std::atoi(argv[3])) : std::thread::hardware_concurrency();
  set_thread_count(thread_count);
  print_machine(thread_count);

  const UniqueFd fd = test::open_file(test::model_path_or_skip());
  double start = now_s();
  const Model model = Model::open(fd.get(), "SmolLM2").value();
  auto loaded = Weights::load(model, thread_count);
  const auto weights = std::make_shared<const Weights>(std::move(loaded).value());
  std::printf("weights: %.2f s to read, hash and dequantise %.0f MB\n", now_s() - start,
              static_cast<double>(model.file().size_bytes()) * 1e-6);
  const Tokenizer tokenizer = Tokenizer::from_gguf(model.gguf()).value();
  const std::string text = test::read_file(test::kGpl3Path);
  start = now_s();
  const std::vector<uint32_t> ids = tokenizer.encode(text).value();
  std::printf("tokenizer: %zu bytes, %zu tokens in %.1f ms\n", text.size(), ids.size(),
              (now_s() - start) * 1e3);

  Transformer transformer(weights);
  KvCache cache = KvCache::create(model.config(), static_cast<uint32_t>(ids.size()) + 64).value();
  std::vector<float> logits(model.config().vocab_size);
  ForwardOptions options;
  options.chunk_tokens = chunk;
  double best = 1e30;
  double best_cpu = 1e30;
  for (int round = 0; round <= rounds; ++round) {
    cache.set_token_count(0);
    const double cpu_start = cpu_s();
    start = now_s();
    if (!transformer.forward(ids, cache, logits, options).is_ok()) return 1;
    const double seconds = now_s() - start;
    const double error = logits_error(logits);
    if (!(error <= 1e-4)) {
      std::printf("the last logits differ from the reference by %.2e: nothing is timed\n", error);
      return 1;
    }
    if (round == 0) continue;  // touches the memory, verifies
    best = std::min(best, seconds);
    best_cpu = std::min(best_cpu, cpu_s() - cpu_start);
    std::printf("prefill: %.2f s, cpu %.2f s, logits within %.1e\n", seconds, cpu_s() - cpu_start,
                error);
  }

  const auto classes =
      product_classes(model.config(), static_cast<int64_t>(ids.size()), chunk, thread_count);
  double flops = 0;
  double product_seconds = 0;
  std::printf("%-18s %9s %9s %8s\n", "products", "GFLOP", "GFLOP/s", "s");
  for (const ProductClass& item : classes) {
    flops += item.flops;
    product_seconds += item.flops / item.rate;
    std::printf("%-18s %9.0f %9.1f %8.2f\n", item.name, item.flops * 1e-9, item.rate * 1e-9,
                item.flops / item.rate);
  }
  std::printf("prefill of %zu tokens: %.2f s, %.0f tokens/s, %.1f GFLOP/s\n", ids.size(), best,
              static_cast<double>(ids.size()) / best, flops / best * 1e-9);
  std::printf("products alone:        %.2f s, %.1f GFLOP/s; prefill runs at %.0f %% of that\n",
              product_seconds, flops / product_seconds * 1e-9, 100 * product_seconds / best);
  report_steps(transformer, cache, ids, 1);
  report_steps(transformer, cache, ids, 20);
  return 0;
}
