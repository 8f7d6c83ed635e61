// The forward pass of the Llama architecture on ATen tensors, a chunk of tokens and a layer at a time. Weights and KV cache
// are the caller's, in memory of the tensors' device; what a chunk needs besides comes from torch's own allocator there.
//
// The maths are those of the pass on the processor (transformer.cpp), in fp32 throughout: products in TF32 are switched off,
// so that a document has the same K and V wherever it was computed, to within rounding. Attention is cut into tiles of query
// rows, so that no matrix of tokens x tokens ever exists.
//
// Parsed as C++17 too, and free of torch's types. Not thread-safe. All work goes to torch's current stream, which is the
// device's default stream: nobody here sets another.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/transformer/torch_gpu.h"

namespace polykv {

/// Sizes, and where the weights lie on the device: matrices [out, in], as in WeightsLayout. Borrowed.
struct PassModel {
  struct Layer {
    const float* attn_norm = nullptr;
    const float* qkv = nullptr;
    const float* attn_output = nullptr;
    const float* ffn_norm = nullptr;
    const float* gate_up = nullptr;
    const float* down = nullptr;
  };
  int64_t head_count = 0;
  int64_t kv_head_count = 0;
  int64_t head_dim = 0;
  int64_t embedding_length = 0;
  int64_t feed_forward_length = 0;
  int64_t vocab_size = 0;
  double rms_epsilon = 0;
  const float* token_embedding = nullptr;
  const float* output_norm = nullptr;
  const float* output = nullptr;
  std::vector<Layer> layers;
  /// Logits of attention that a tile has at most: heads x rows x keys; one row at least.
  int64_t tile_logits = 0;
};

/// One layer of a KV cache on the device: [kv_head, token, head_dim] with room for capacity_tokens.
struct PassCache {
  float* k = nullptr;
  float* v = nullptr;
  int64_t capacity_tokens = 0;
  int64_t first_key = 0;  // of the chunk's rows; those before it are there
};

/// Errors of all functions: POLYKV_ERR_NO_MEMORY (device memory), POLYKV_ERR_DEVICE_LOST (the driver), after which the
/// process cannot use the device any more, POLYKV_ERR_INTERNAL.
class TensorPass {
 public:
  static Result<std::unique_ptr<TensorPass>> create(const TorchDevice& device, PassModel model);
  ~TensorPass();
  TensorPass(const TensorPass&) = delete;
  TensorPass& operator=(const TensorPass&) = delete;

  /// ids: [row]; cosine, sine: [row, head_dim / 2] of RoPE's angles. All in host memory.
  Status begin_chunk(const int64_t* ids, int64_t row_count, const float* cosine, const float* sine);
  /// Q, K and V of the chunk; K after RoPE and V go into the cache.
  Status project(size_t layer, const PassCache& cache);
  /// Of the last rows, what project() left: [row, head, head_dim] in host memory. Waits for it.
  Status copy_queries(int64_t row_count, float* q);
  /// The rest of the layer for the chunk's last `row_count` rows.
  Status finish_layer(size_t layer, const PassCache& cache, int64_t row_count);
  /// Of the last rows: [row, vocab_size] in host memory. Waits for it.
  Status read_out(int64_t row_count, float* logits);
  /// Waits for the device.
  Status synchronize();

 private:
  struct State;
  explicit TensorPass(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Gives back what torch's allocator keeps of finished work, so that the device's free memory is what the next document
/// has. Before torch 2.9 there is no word for it: what is kept is used again, but looks used.
void release_unused(const TorchDevice& device);

/// Does once what torch does at its first use of the device and would be refused later: context, library handles and
/// kernels of a small pass.
Status warm_up_tensors(const TorchDevice& device);

}  // namespace polykv
