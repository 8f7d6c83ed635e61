#include "daemon/prefill/model/weights.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>

#include "daemon/prefill/model/fingerprint.h"
#include "daemon/prefill/model/memory_region.h"

namespace polykv {

namespace {

/// One tensor to load: where its rows go, and which order they have in the file.
struct LoadTask {
  const TensorInfo* tensor;
  size_t index;         // in gguf().tensors()
  uint64_t target;      // floats from the region's start
  uint32_t rotary_dim;  // 0: rows stay in order; else each run of so many rows is a permuted head
};

std::vector<LoadTask> load_tasks(const Model& model, const WeightsLayout& layout) {
  const LlamaTensors& tensors = model.tensors();
  const ModelConfig& config = model.config();
  const TensorInfo* first = model.gguf().tensors().data();
  std::vector<LoadTask> tasks;
  const auto add = [&](const TensorInfo* tensor, uint64_t target, uint32_t rotary_dim = 0) {
    tasks.push_back({tensor, static_cast<size_t>(tensor - first), target, rotary_dim});
  };
  add(tensors.token_embedding, layout.token_embedding);
  add(tensors.output_norm, layout.output_norm);
  if (tensors.output != nullptr) add(tensors.output, layout.output);
  const uint64_t embedding = config.embedding_length;
  const uint64_t k_row = uint64_t{config.head_count} * config.head_dim;
  const uint64_t v_row = k_row + uint64_t{config.kv_head_count} * config.head_dim;
  for (size_t i = 0; i < tensors.layers.size(); ++i) {
    const LlamaTensors::Layer& source = tensors.layers[i];
    const WeightsLayout::Layer& target = layout.layers[i];
    add(source.attn_norm, target.attn_norm);
    add(source.attn_q, target.qkv, config.rope.rotary_dim);
    add(source.attn_k, target.qkv + k_row * embedding, config.rope.rotary_dim);
    add(source.attn_v, target.qkv + v_row * embedding);
    add(source.attn_output, target.attn_output);
    add(source.ffn_norm, target.ffn_norm);
    add(source.ffn_gate, target.gate_up);
    add(source.ffn_up, target.gate_up + uint64_t{config.feed_forward_length} * embedding);
    add(source.ffn_down, target.down);
  }
  // The largest first, so that no thread is left alone with it at the end.
  std::stable_sort(tasks.begin(), tasks.end(), [](const LoadTask& a, const LoadTask& b) {
    return a.tensor->size_bytes > b.tensor->size_bytes;
  });
  return tasks;
}

/// A GGUF's row 2j + a of a head is row a * dim/2 + j in the half-rotation layout (j < dim/2, a =
/// 0, 1).
uint64_t unpermuted_row(uint64_t row, uint32_t rotary_dim) {
  if (rotary_dim == 0) return row;
  const uint64_t in_head = row % rotary_dim;
  return row - in_head + (in_head % 2) * (rotary_dim / 2) + in_head / 2;
}

/// State that the loading threads share.
class Loader {
 public:
  Loader(const Model& model, std::vector<LoadTask> tasks, float* target)
      : model_(model), tasks_(std::move(tasks)), target_(target), digests_(tasks_.size()) {
    for (const LoadTask& task : tasks_) bytes_total_ += task.tensor->size_bytes;
  }

  /// Takes tasks until none is left. Only the calling thread of load() has a `progress`.
  void work(const Weights::Progress& progress) {
    for (size_t i = next_++; i < tasks_.size() && !stop_; i = next_++) {
      const Status status = load(tasks_[i]);
      if (!status.is_ok()) return fail(status);
      if (progress && !progress(bytes_done_, bytes_total_)) {
        return fail({POLYKV_ERR_CANCELLED, "load model: cancelled"});
      }
    }
  }

  const Status& status() const { return status_; }
  std::span<const Digest> digests() const { return digests_; }

 private:
  Status load(const LoadTask& task) {
    const TensorInfo& tensor = *task.tensor;
    const uint64_t columns = tensor.dimensions[0];
    const uint64_t row_bytes = tensor.size_bytes / (tensor.value_count / columns);
    const auto consume = [&](uint64_t first_row, uint64_t row_count,
                             std::span<const uint8_t> bytes) {
      for (uint64_t i = 0; i < row_count; ++i) {
        float* row =
            target_ + task.target + unpermuted_row(first_row + i, task.rotary_dim) * columns;
        dequantise(tensor.type, bytes.subspan(i * row_bytes, row_bytes), std::span(row, columns));
      }
      bytes_done_ += bytes.size();
    };
    POLYKV_ASSIGN_OR_RETURN(digests_[task.index],
                            read_and_hash_tensor(model_.file(), tensor, consume));
    return Status::ok();
  }

  void fail(const Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status_.is_ok()) status_ = status;
    stop_ = true;
  }

  const Model& model_;
  const std::vector<LoadTask> tasks_;
  float* target_;
  std::vector<Digest> digests_;  // each written by the one thread that has the task
  uint64_t bytes_total_ = 0;
  std::atomic<size_t> next_{
      0};  // default order: only the counting matters; join() publishes the results
  std::atomic<uint64_t> bytes_done_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  Status status_;  // guarded by mutex_ until the threads are joined
};

}  // namespace

WeightsLayout weights_layout(const ModelConfig& config, bool tied_output) {
  WeightsLayout layout;
  const auto place = [&](uint64_t rows, uint64_t columns) {
    static constexpr uint64_t kAlignFloats = 16;
    const uint64_t at = layout.value_count;
    layout.value_count += (rows * columns + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
    return at;
  };
  const uint64_t embedding = config.embedding_length;
  const uint64_t q_rows = uint64_t{config.head_count} * config.head_dim;
  const uint64_t kv_rows = uint64_t{config.kv_head_count} * config.head_dim;
  layout.token_embedding = place(config.vocab_size, embedding);
  layout.output_norm = place(1, embedding);
  layout.output = tied_output ? layout.token_embedding : place(config.vocab_size, embedding);
  for (uint32_t i = 0; i < config.layer_count; ++i) {
    WeightsLayout::Layer layer;
    layer.attn_norm = place(1, embedding);
    layer.qkv = place(q_rows + 2 * kv_rows, embedding);
    layer.attn_output = place(embedding, q_rows);
    layer.ffn_norm = place(1, embedding);
    layer.gate_up = place(2 * uint64_t{config.feed_forward_length}, embedding);
    layer.down = place(embedding, config.feed_forward_length);
    layout.layers.push_back(layer);
  }
  return layout;
}

uint64_t weights_bytes(const ModelConfig& config, bool tied_output) {
  return weights_layout(config, tied_output).value_count * sizeof(float);
}

Result<Weights> Weights::load(const Model& model, uint32_t thread_count, const Progress& progress) {
  Weights weights;
  weights.config_ = model.config();
  weights.tied_output_ = model.tensors().output == nullptr;
  weights.layout_ = weights_layout(weights.config_, weights.tied_output_);
  POLYKV_ASSIGN_OR_RETURN(
      weights.region_, allocate_region(weights.layout_.value_count * sizeof(float), "the weights"));
  auto* target = static_cast<float*>(weights.region_.get());
  weights.data_ = target;

  Loader loader(model, load_tasks(model, weights.layout_), target);
  std::vector<std::thread> helpers;
  for (uint32_t i = 1; i < thread_count; ++i) {
    try {
      helpers.emplace_back([&loader] { loader.work({}); });
    } catch (const std::system_error&) {
      break;  // no more threads to be had: the others do the work
    }
  }
  loader.work(progress);
  for (std::thread& helper : helpers) helper.join();
  POLYKV_RETURN_IF_ERROR(loader.status());
  weights.fingerprint_ = combine_fingerprint(model, loader.digests());
  return weights;
}

void Weights::touch() const {
  static constexpr uint64_t kPageFloats = 4096 / sizeof(float);
  const volatile float* values = data_;
  for (uint64_t i = 0; i < layout_.value_count; i += kPageFloats) static_cast<void>(values[i]);
}

}  // namespace polykv
