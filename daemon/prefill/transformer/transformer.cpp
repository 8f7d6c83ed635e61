#include "daemon/prefill/transformer/transformer.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cassert>

#include "daemon/prefill/transformer/attention.h"
#include "daemon/prefill/transformer/blas.h"
#include "daemon/prefill/transformer/rope.h"
#include "daemon/prefill/transformer/row_kernels.h"

namespace polykv {

namespace {

std::atomic<uint32_t> process_threads{1};  // relaxed: a number that is set once, before any work

/// Floats of one row in each of the buffers that pass through a layer.
struct RowSizes {
  explicit RowSizes(const ModelConfig& config)
      : embedding(config.embedding_length),
        qkv((size_t{config.head_count} + 2 * size_t{config.kv_head_count}) * config.head_dim),
        heads(size_t{config.head_count} * config.head_dim),
        hidden(config.feed_forward_length) {}
  size_t embedding;
  size_t qkv;
  size_t heads;
  size_t hidden;
  size_t total() const { return 2 * embedding + qkv + heads + 3 * hidden; }
};

/// Runs body(row) for all rows on the team's threads.
template <typename Body>
void for_each_row(size_t row_count, uint32_t thread_count, const Body& body) {
  const auto count = static_cast<int64_t>(row_count);
#pragma omp parallel for num_threads(static_cast <int>(thread_count)) \
    schedule(static) if (count >= 8)
  for (int64_t row = 0; row < count; ++row) body(static_cast<size_t>(row));
}

}  // namespace

struct Transformer::State {
  std::shared_ptr<const Weights> weights;
  const ModelConfig& config;
  const RowSizes sizes;
  uint32_t thread_count = 1;  // of the call in progress
  Attention attention;
  // Rows of the chunk in progress.
  std::vector<float> x;        // [row, embedding]: the residual stream
  std::vector<float> normed;   // [row, embedding]
  std::vector<float> qkv;      // [row, (heads + 2 kv_heads) * head_dim]
  std::vector<float> heads;    // [row, heads * head_dim]
  std::vector<float> gate_up;  // [row, 2 * feed_forward]
  std::vector<float> hidden;   // [row, feed_forward]
  std::vector<float> cosine;   // [row, head_dim / 2]: of RoPE's angles
  std::vector<float> sine;
  std::vector<float> prefix_output;    // [row, heads * head_dim], only with a prefix
  std::vector<float> prefix_log_sums;  // [row, head]
  std::vector<float>
      inverse_frequency;  // [head_dim / 2]: RoPE's angle from one position to the next

  explicit State(std::shared_ptr<const Weights> w)
      : weights(std::move(w)),
        config(weights->config()),
        sizes(config),
        inverse_frequency(rope_frequencies(config)) {}

  const float* at(uint64_t offset) const { return weights->data() + offset; }
  void reserve(size_t row_count);
  void embed(std::span<const uint32_t> ids);
  void normalise(size_t row_count, const float* input, const float* weight);
  void rotate_and_store(size_t row_count, KvCache& cache, uint32_t layer);
  Result<PrefixAttention> attend_to(const Prefix& prefix, uint32_t layer, size_t first_row,
                                    size_t row_count);
  void feed_forward(size_t row_count, float* rows, const WeightsLayout::Layer& layer);
  Status run_chunk(std::span<const uint32_t> ids, KvCache& cache, size_t wanted_rows,
                   const ForwardOptions& options);
  void read_out(const float* rows, size_t row_count, float* logits);
};

void Transformer::State::reserve(size_t row_count) {
  const auto grow = [&](std::vector<float>& buffer, size_t row_floats) {
    if (buffer.size() < row_count * row_floats) buffer.resize(row_count * row_floats);
  };
  grow(x, sizes.embedding);
  grow(normed, sizes.embedding);
  grow(qkv, sizes.qkv);
  grow(heads, sizes.heads);
  grow(gate_up, 2 * sizes.hidden);
  grow(hidden, sizes.hidden);
  grow(cosine, config.head_dim / 2);
  grow(sine, config.head_dim / 2);
}

void Transformer::State::embed(std::span<const uint32_t> ids) {
  const float* table = at(weights->layout().token_embedding);
  for (size_t row = 0; row < ids.size(); ++row) {
    const float* source = table + size_t{ids[row]} * sizes.embedding;
    std::copy(source, source + sizes.embedding, &x[row * sizes.embedding]);
  }
}

void Transformer::State::normalise(size_t row_count, const float* input, const float* weight) {
  const auto epsilon = static_cast<float>(config.rms_epsilon);
  for_each_row(row_count, thread_count, [&](size_t row) {
    row_kernels().rms_norm(input + row * sizes.embedding, weight, epsilon, sizes.embedding,
                           &normed[row * sizes.embedding]);
  });
}

/// Into the cache behind its tokens.
void Transformer::State::rotate_and_store(size_t row_count, KvCache& cache, uint32_t layer) {
  const RowKernels& kernels = row_kernels();
  const size_t dim = config.head_dim;
  const size_t half = dim / 2;
  for_each_row(row_count, thread_count, [&](size_t row) {
    const float* cosines = &cosine[row * half];
    const float* sines = &sine[row * half];
    float* q = &qkv[row * sizes.qkv];
    float* k = q + sizes.heads;
    const float* v = k + size_t{config.kv_head_count} * dim;
    for (uint32_t head = 0; head < config.head_count; ++head) {
      kernels.rotate_half(q + head * dim, cosines, sines, half);
    }
    for (uint32_t head = 0; head < config.kv_head_count; ++head) {
      kernels.rotate_half(k + head * dim, cosines, sines, half);
      const size_t target =
          head * cache.head_stride() + (cache.token_count() + row) * cache.token_stride();
      std::copy(k + head * dim, k + (head + 1) * dim, cache.k(layer) + target);
      std::copy(v + head * dim, v + (head + 1) * dim, cache.v(layer) + target);
    }
  });
}

void Transformer::State::feed_forward(size_t row_count, float* rows,
                                      const WeightsLayout::Layer& layer) {
  const auto count = static_cast<int64_t>(row_count);
  const auto embedding = static_cast<int64_t>(sizes.embedding);
  const auto width = static_cast<int64_t>(sizes.hidden);
  normalise(row_count, rows, at(layer.ffn_norm));
  multiply_transposed(normed.data(), at(layer.gate_up), gate_up.data(), count, 2 * width, embedding,
                      Store::overwrite);
  for_each_row(row_count, thread_count, [&](size_t row) {
    const float* gate = &gate_up[row * 2 * sizes.hidden];
    row_kernels().silu_multiply(gate, gate + sizes.hidden, sizes.hidden,
                                &hidden[row * sizes.hidden]);
  });
  multiply_transposed(hidden.data(), at(layer.down), rows, count, embedding, width, Store::add);
}

Result<PrefixAttention> Transformer::State::attend_to(const Prefix& prefix, uint32_t layer,
                                                      size_t first_row, size_t row_count) {
  prefix_output.resize(std::max(prefix_output.size(), row_count * sizes.heads));
  prefix_log_sums.resize(std::max(prefix_log_sums.size(), row_count * config.head_count));
  POLYKV_RETURN_IF_ERROR(prefix.attend({layer, static_cast<uint32_t>(row_count), config.head_count,
                                        &qkv[first_row * sizes.qkv], sizes.qkv, thread_count},
                                       prefix_output.data(), prefix_log_sums.data()));
  return PrefixAttention{prefix_output.data(), prefix_log_sums.data()};
}

/// K and V of all rows go into the cache. Above the last layer's K and V only the last `wanted_rows`
/// are computed: they end in the last rows of x.
Status Transformer::State::run_chunk(std::span<const uint32_t> ids, KvCache& cache,
                                     size_t wanted_rows, const ForwardOptions& options) {
  const size_t row_count = ids.size();
  const uint32_t first_key = cache.token_count();
  const uint32_t first_position =
      first_key + (options.prefix != nullptr ? options.prefix->token_count() : 0);
  embed(ids);
  // Not kept for a whole document: an agent would hold megabytes of them.
  rope_angles(inverse_frequency, first_position, row_count, cosine.data(), sine.data());
  for (uint32_t i = 0; i < config.layer_count; ++i) {
    if (options.between_layers && !options.between_layers())
      return forward_cancelled(cache.token_count());
    const WeightsLayout::Layer& layer = weights->layout().layers[i];
    normalise(row_count, x.data(), at(layer.attn_norm));
    multiply_transposed(normed.data(), at(layer.qkv), qkv.data(), static_cast<int64_t>(row_count),
                        static_cast<int64_t>(sizes.qkv), static_cast<int64_t>(sizes.embedding),
                        Store::overwrite);
    float* k = &qkv[sizes.heads];
    const LayerRows projected = {
        i, first_position, row_count, sizes.qkv, qkv.data(), k, k + (sizes.qkv - sizes.heads) / 2};
    if (options.before_rope) options.before_rope(projected);
    rotate_and_store(row_count, cache, i);
    if (options.after_rope) options.after_rope(projected);

    const bool is_last_layer = i + 1 == config.layer_count;
    if (is_last_layer && wanted_rows == 0) break;
    const size_t skipped = is_last_layer ? row_count - wanted_rows : 0;
    const size_t rows = row_count - skipped;
    AttentionShape shape = {config.head_count,
                            static_cast<uint32_t>(rows),
                            first_key + static_cast<uint32_t>(skipped),
                            sizes.qkv,
                            thread_count,
                            {}};
    if (options.prefix != nullptr) {
      POLYKV_ASSIGN_OR_RETURN(shape.prefix, attend_to(*options.prefix, i, skipped, rows));
    }
    attention.run(shape, &qkv[skipped * sizes.qkv], cache, i, heads.data());
    float* residual = &x[skipped * sizes.embedding];
    multiply_transposed(heads.data(), at(layer.attn_output), residual, static_cast<int64_t>(rows),
                        static_cast<int64_t>(sizes.embedding), static_cast<int64_t>(sizes.heads),
                        Store::add);
    feed_forward(rows, residual, layer);
  }
  cache.set_token_count(first_key + static_cast<uint32_t>(row_count));
  return Status::ok();
}

void Transformer::State::read_out(const float* rows, size_t row_count, float* logits) {
  normalise(row_count, rows, at(weights->layout().output_norm));
  multiply_transposed(normed.data(), at(weights->layout().output), logits,
                      static_cast<int64_t>(row_count), static_cast<int64_t>(config.vocab_size),
                      static_cast<int64_t>(sizes.embedding), Store::overwrite);
}

Transformer::Transformer(std::shared_ptr<const Weights> weights)
    : state_(std::make_unique<State>(std::move(weights))) {}
Transformer::Transformer(Transformer&&) noexcept = default;
Transformer& Transformer::operator=(Transformer&&) noexcept = default;
Transformer::~Transformer() = default;

const ModelConfig& Transformer::config() const {
  return state_->config;
}

Status Transformer::forward(std::span<const uint32_t> ids, KvCache& cache, std::span<float> logits,
                            const ForwardOptions& options) {
  const ModelConfig& config = state_->config;
  POLYKV_RETURN_IF_ERROR(check_forward(config, ids, logits.size(), cache.shape(), options));
  const bool all_rows = !logits.empty() && logits.size() == ids.size() * config.vocab_size;
  const uint64_t end = uint64_t{cache.token_count()} + ids.size();

  state_->thread_count = process_threads.load(std::memory_order_relaxed);
  omp_set_num_threads(
      static_cast<int>(state_->thread_count));  // OpenMP's setting is per calling thread
  const BlasScope scope;
  const size_t chunk = std::min<size_t>(options.chunk_tokens, ids.size());
  state_->reserve(chunk);
  for (size_t done = 0; done < ids.size(); done += chunk) {
    const auto part = ids.subspan(done, std::min(chunk, ids.size() - done));
    const bool is_last = done + part.size() == ids.size();
    const size_t last_row = is_last && !logits.empty() ? 1 : 0;
    const size_t wanted_rows = all_rows ? part.size() : last_row;
    POLYKV_RETURN_IF_ERROR(state_->run_chunk(part, cache, wanted_rows, options));
    if (wanted_rows > 0) {
      state_->read_out(&state_->x[(part.size() - wanted_rows) * state_->sizes.embedding],
                       wanted_rows, logits.data() + (all_rows ? done * config.vocab_size : 0));
    }
    if (options.progress && !options.progress(cache.token_count(), static_cast<uint32_t>(end)) &&
        !is_last) {
      return forward_cancelled(cache.token_count());
    }
  }
  return Status::ok();
}

uint32_t argmax(std::span<const float> logits) {
  return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

void set_thread_count(uint32_t thread_count) {
  process_threads.store(std::max(thread_count, 1U), std::memory_order_relaxed);
  set_blas_threads(std::max(thread_count, 1U));
}

MemoryEstimate estimate_memory(const ModelConfig& config, bool tied_output, uint32_t token_count,
                               uint32_t chunk_tokens) {
  const uint32_t rows = std::max(1U, std::min(token_count, chunk_tokens));
  const uint32_t threads = process_threads.load(std::memory_order_relaxed);
  MemoryEstimate estimate;
  estimate.weights_bytes = weights_bytes(config, tied_output);
  estimate.kv_cache_bytes = KvCache::size_bytes(config, token_count);
  // Row buffers, RoPE's angles, attention, logits, and what the BLAS packs (32 MiB a thread in
  // Debian's OpenBLAS).
  static constexpr uint64_t kBlasBytesPerThread = uint64_t{32} << 20;
  estimate.scratch_bytes =
      sizeof(float) * (rows * (RowSizes(config).total() + config.head_dim) + config.vocab_size) +
      Attention::scratch_bytes(config, rows, threads) + threads * kBlasBytesPerThread;
  return estimate;
}

}  // namespace polykv
