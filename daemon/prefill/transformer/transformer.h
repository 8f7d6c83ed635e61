// The Llama architecture in fp32 on libtorch: prefill, and decode steps over an existing cache.
// This header needs no torch.
//
// Attention is tiled over query rows and keys with a running softmax: no matrix of tokens x tokens
// ever exists.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/model/weights.h"
#include "daemon/prefill/transformer/forward.h"
#include "daemon/prefill/transformer/kv_cache.h"

namespace polykv {

MemoryEstimate estimate_memory(const ModelConfig& config, bool tied_output, uint32_t token_count,
                               uint32_t chunk_tokens);

/// Keeps scratch memory between calls. One thread at a time; inside, it uses set_thread_count()
/// threads.
class Transformer {
 public:
  explicit Transformer(std::shared_ptr<const Weights> weights);
  Transformer(Transformer&&) noexcept;
  Transformer& operator=(Transformer&&) noexcept;
  ~Transformer();

  const ModelConfig& config() const;

  /// Appends `ids` to the cache at positions cache.token_count() onwards (behind the prefix, if there is one): a prefill when the cache
  /// is empty, a suffix or a decode step otherwise. `logits` receives nothing when it is empty, the
  /// last row's when it has vocab_size floats, and [id, vocab_size] when it has as many for each id.
  /// POLYKV_ERR_INVALID_ARGUMENT: an id outside the vocabulary, a cache of
  /// another shape or too small, no ids. POLYKV_ERR_CONTEXT_EXCEEDED: the sequence, with the prefix, would be longer
  /// than the model's context. An error of the prefix: the cache keeps the chunks that are done.
  Status forward(std::span<const uint32_t> ids, KvCache& cache, std::span<float> logits,
                 const ForwardOptions& options = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Position of the largest logit (the first of equals): greedy decoding.
uint32_t argmax(std::span<const float> logits);

/// Threads for libtorch, its BLAS and our own loops, for the whole process. Call it once, before
/// the first forward().
void set_thread_count(uint32_t thread_count);

/// The first thing in main(): makes OpenMP's threads sleep while they wait. By default they spin, and on a machine that
/// others use as well that burns several times the processor time of the work. libgomp reads its environment when it is
/// loaded, so this sets OMP_WAIT_POLICY=passive and executes the program once more, with the same arguments and descriptors.
/// Does nothing when the variable is set, to whatever value.
void wait_passively(char** argv);

/// Which BLAS libtorch multiplies with, for `doctor`: "OpenBLAS 0.3.21 ... (OpenMP)".
struct BlasInfo {
  std::string description;
  bool is_good =
      false;  // OpenBLAS with OpenMP threads; others are several times slower or fight over cores
  std::string remedy;  // empty when good: "install libopenblas0-openmp"
};
BlasInfo blas_info();

}  // namespace polykv
