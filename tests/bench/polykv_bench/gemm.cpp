#include "tests/bench/polykv_bench/gemm.h"

#include <dlfcn.h>

#include <vector>

#include "tests/bench/polykv_bench/measure.h"

namespace polykv::bench {

namespace {

constexpr int kRowMajor = 101;
constexpr int kPlain = 111;
constexpr int kTransposed = 112;

using Sgemm = void (*)(int order, int transpose_a, int transpose_b, int rows, int columns,
                       int inner, float alpha, const float* a, int a_stride, const float* b,
                       int b_stride, float beta, float* c, int c_stride);
using SetThreads = void (*)(int count);

}  // namespace

double gemm_layer_s(const Shape& shape, uint32_t rows, uint32_t threads) {
  void* library = ::dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 0;
  const auto sgemm = reinterpret_cast<Sgemm>(::dlsym(library, "cblas_sgemm"));
  const auto set_threads =
      reinterpret_cast<SetThreads>(::dlsym(library, "openblas_set_num_threads"));
  if (sgemm == nullptr || set_threads == nullptr) return 0;
  set_threads(static_cast<int>(threads));
  const auto tokens = static_cast<int>(shape.tokens);
  const auto dim = static_cast<int>(shape.head_dim);
  const auto count = static_cast<int>(rows);
  std::vector<float> q(size_t{rows} * shape.head_dim, 0.5F);
  const std::vector<float> cache(shape.tokens * shape.head_dim, 0.25F);
  std::vector<float> scores(rows * shape.tokens);
  const auto layer = [&] {
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      sgemm(kRowMajor, kPlain, kTransposed, count, tokens, dim, 1e-3F, q.data(), dim, cache.data(),
            dim, 0, scores.data(), tokens);
      sgemm(kRowMajor, kPlain, kPlain, count, dim, tokens, 1e-3F, scores.data(), tokens,
            cache.data(), dim, 0, q.data(), dim);
    }
  };
  layer();  // starts its threads
  return seconds_of(threads, layer);
}

}  // namespace polykv::bench
