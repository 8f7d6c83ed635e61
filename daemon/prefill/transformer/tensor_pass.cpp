#include "daemon/prefill/transformer/tensor_pass.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
#include <c10/core/CachingDeviceAllocator.h>
#define POLYKV_CAN_RELEASE_UNUSED 1
#endif
#endif
#if __has_include(<ATen/ops/scaled_dot_product_attention.h>)
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#define POLYKV_FUSED_ATTENTION 1
#else
#define POLYKV_FUSED_ATTENTION 0
#endif

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <new>
#include <string>

#include "daemon/prefill/transformer/torch_failure.h"

namespace polykv {

namespace {

Status failed(const char* operation, const std::exception& error) {
  const std::string text = error.what();
  const std::string cause =
      std::string(operation) + " on the device: " + text.substr(0, text.find('\n'));
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr)
    return {POLYKV_ERR_NO_MEMORY, std::string(operation) + ": out of host memory"};
  const polykv_status code = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr
                                 ? POLYKV_ERR_NO_MEMORY
                                 : torch_failure_code(text);
  if (code == POLYKV_ERR_NO_MEMORY)
    return {code, cause + "; free device memory or cut the document"};
  if (code == POLYKV_ERR_DEVICE_LOST)
    return {code, cause + "; see nvidia-smi and the kernel's log (Xid)"};
  return {code, cause};
}

/// No exception of torch's leaves this file.
template <typename Body>
Status guarded(const char* operation, const at::Device& device, const Body& body) {
  try {
    const c10::InferenceMode no_gradients;
    const c10::DeviceGuard guard(device);
    body();
    return Status::ok();
  } catch (const std::exception& error) {
    return failed(operation, error);
  }
}

at::Device at_device(const TorchDevice& device) {
  return device.is_cuda ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device.index))
                        : at::Device(at::kCPU);
}

/// A view of the caller's memory on the device.
at::Tensor view(const float* data, at::IntArrayRef shape, const at::Device& device) {
  return at::for_blob(const_cast<float*>(data), shape)
      .options(at::device(device).dtype(at::kFloat))
      .target_device(device)
      .make_tensor();
}

/// Waits: the host memory may go afterwards.
template <typename T>
at::Tensor upload(const T* data, at::IntArrayRef shape, at::ScalarType type,
                  const at::Device& device) {
  at::Tensor target = at::empty(shape, at::device(device).dtype(type));
  target.copy_(at::from_blob(const_cast<T*>(data), shape, at::dtype(type)));
  return target;
}

void download(const at::Tensor& source, float* target) {
  at::from_blob(target, source.sizes(), at::kFloat).copy_(source);
}

}  // namespace

struct TensorPass::State {
  struct Layer {
    at::Tensor attn_norm, qkv, attn_output, ffn_norm, gate_up, down;  // matrices transposed
  };
  PassModel model;
  at::Device device;
  at::Tensor embedding, output_norm, output;
  std::vector<Layer> layers;
  // The chunk in progress.
  int64_t rows = 0;
  at::Tensor x;             // [row, embedding]: the residual stream
  at::Tensor projected;     // [row, (heads + 2 kv_heads) * head_dim]
  at::Tensor cosine, sine;  // [row, 1, head_dim / 2]

  State(const TorchDevice& where, PassModel given);

  at::Tensor normalise(const at::Tensor& input, const at::Tensor& weight) const {
    return input.square().mean(-1, true).add_(model.rms_epsilon).rsqrt_().mul(input).mul_(weight);
  }
  at::Tensor cached(const float* data, const PassCache& cache) const {
    return view(data, {model.kv_head_count, cache.capacity_tokens, model.head_dim}, device);
  }
  void rotate_and_store(const PassCache& cache);
  at::Tensor attend(const PassCache& cache, int64_t row_count) const;
  at::Tensor attend_tile(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;
};

TensorPass::State::State(const TorchDevice& where, PassModel given)
    : model(std::move(given)), device(at_device(where)) {
  const int64_t width = model.embedding_length;
  const int64_t heads = model.head_count * model.head_dim;
  const int64_t hidden = model.feed_forward_length;
  const int64_t all_heads = heads + 2 * model.kv_head_count * model.head_dim;
  embedding = view(model.token_embedding, {model.vocab_size, width}, device);
  output_norm = view(model.output_norm, {width}, device);
  output = view(model.output, {model.vocab_size, width}, device).t();
  for (const PassModel::Layer& layer : model.layers) {
    layers.push_back(
        {view(layer.attn_norm, {width}, device), view(layer.qkv, {all_heads, width}, device).t(),
         view(layer.attn_output, {width, heads}, device).t(), view(layer.ffn_norm, {width}, device),
         view(layer.gate_up, {2 * hidden, width}, device).t(),
         view(layer.down, {width, hidden}, device).t()});
  }
}

void TensorPass::State::rotate_and_store(const PassCache& cache) {
  const int64_t turned = model.head_count + model.kv_head_count;
  const int64_t half = model.head_dim / 2;
  const at::Tensor heads =
      projected.narrow(1, 0, turned * model.head_dim).view({rows, turned, model.head_dim});
  const at::Tensor first = heads.narrow(2, 0, half);
  const at::Tensor second = heads.narrow(2, half, half);
  const at::Tensor turned_first = first.mul(cosine).sub_(second.mul(sine));
  second.mul_(cosine).add_(first.mul(sine));
  first.copy_(turned_first);
  const auto store = [&](float* data, int64_t first_head) {
    const at::Tensor source =
        projected.narrow(1, first_head * model.head_dim, model.kv_head_count * model.head_dim)
            .view({rows, model.kv_head_count, model.head_dim});
    cached(data, cache).narrow(1, cache.first_key, rows).copy_(source.transpose(0, 1));
  };
  store(cache.k, model.head_count);
  store(cache.v, turned);
}

/// q: [kv_head, group, row, head_dim]; k, v: [kv_head, key, head_dim], of which row i of n sees all but the last n - 1 - i.
at::Tensor TensorPass::State::attend_tile(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v) const {
  const int64_t group = q.size(1);
  const int64_t row_count = q.size(2);
  const int64_t keys = k.size(1);
  const auto type = at::device(device).dtype(at::kFloat);
  // Only a row's own keys and those of the rows behind it can be hidden.
  const at::Tensor hidden =
      at::full({row_count, row_count}, -std::numeric_limits<float>::infinity(), type).triu(1);
#if POLYKV_FUSED_ATTENTION
  at::Tensor mask = at::zeros({row_count, keys}, type);
  mask.narrow(1, keys - row_count, row_count).copy_(hidden);
  const auto for_group = [&](const at::Tensor& one) {
    return one.unsqueeze(1).expand({one.size(0), group, keys, one.size(2)});
  };
  return at::scaled_dot_product_attention(q, for_group(k), for_group(v), mask);
#else
  const auto factor = 1.0 / std::sqrt(static_cast<double>(model.head_dim));
  const at::Tensor stacked =
      q.mul(factor).reshape({model.kv_head_count, group * row_count, model.head_dim});
  at::Tensor logits = at::bmm(stacked, k.transpose(1, 2));
  logits.view({model.kv_head_count, group, row_count, keys})
      .narrow(3, keys - row_count, row_count)
      .add_(hidden);
  return at::bmm(at::softmax(logits, -1), v)
      .view({model.kv_head_count, group, row_count, model.head_dim});
#endif
}

/// Of the chunk's last rows: [row, heads * head_dim].
at::Tensor TensorPass::State::attend(const PassCache& cache, int64_t row_count) const {
  const int64_t width = model.head_count * model.head_dim;
  const int64_t group = model.head_count / model.kv_head_count;
  const at::Tensor k = cached(cache.k, cache);
  const at::Tensor v = cached(cache.v, cache);
  at::Tensor result = at::empty({row_count, width}, at::device(device).dtype(at::kFloat));
  const int64_t all_keys = cache.first_key + rows;
  const int64_t tile = std::max<int64_t>(model.tile_logits / (model.head_count * all_keys), 1);
  for (int64_t done = 0; done < row_count; done += tile) {
    const int64_t count = std::min(tile, row_count - done);
    const int64_t first = rows - row_count + done;
    const int64_t keys = cache.first_key + first + count;
    const at::Tensor q = projected.narrow(0, first, count)
                             .narrow(1, 0, width)
                             .view({count, model.kv_head_count, group, model.head_dim})
                             .permute({1, 2, 0, 3});
    const at::Tensor attended = attend_tile(q, k.narrow(1, 0, keys), v.narrow(1, 0, keys));
    result.narrow(0, done, count)
        .view({count, model.kv_head_count, group, model.head_dim})
        .copy_(attended.permute({2, 0, 1, 3}));
  }
  return result;
}

TensorPass::TensorPass(std::unique_ptr<State> state) : state_(std::move(state)) {}
TensorPass::~TensorPass() = default;

Result<std::unique_ptr<TensorPass>> TensorPass::create(const TorchDevice& device, PassModel model) {
  std::unique_ptr<TensorPass> pass;
  POLYKV_RETURN_IF_ERROR(guarded("prepare a forward pass", at_device(device), [&] {
    // Of the process; nothing else in it multiplies on a GPU.
    at::globalContext().setAllowTF32CuBLAS(false);
    pass.reset(new TensorPass(std::make_unique<State>(device, std::move(model))));
  }));
  return pass;
}

Status TensorPass::begin_chunk(const int64_t* ids, int64_t row_count, const float* cosine,
                               const float* sine) {
  State& s = *state_;
  return guarded("embed tokens", s.device, [&] {
    s.rows = row_count;
    const int64_t half = s.model.head_dim / 2;
    s.cosine = upload(cosine, {row_count, 1, half}, at::kFloat, s.device);
    s.sine = upload(sine, {row_count, 1, half}, at::kFloat, s.device);
    s.x = s.embedding.index_select(0, upload(ids, {row_count}, at::kLong, s.device));
  });
}

Status TensorPass::project(size_t layer, const PassCache& cache) {
  State& s = *state_;
  return guarded("compute K and V", s.device, [&] {
    s.projected = at::mm(s.normalise(s.x, s.layers[layer].attn_norm), s.layers[layer].qkv);
    s.rotate_and_store(cache);
  });
}

Status TensorPass::copy_queries(int64_t row_count, float* q) {
  const State& s = *state_;
  return guarded("copy queries", s.device, [&] {
    const int64_t width = s.model.head_count * s.model.head_dim;
    download(s.projected.narrow(0, s.rows - row_count, row_count).narrow(1, 0, width), q);
  });
}

Status TensorPass::finish_layer(size_t layer, const PassCache& cache, int64_t row_count) {
  State& s = *state_;
  return guarded("attend", s.device, [&] {
    const State::Layer& weights = s.layers[layer];
    at::Tensor residual = s.x.narrow(0, s.rows - row_count, row_count);
    residual.addmm_(s.attend(cache, row_count), weights.attn_output);
    const at::Tensor both = at::mm(s.normalise(residual, weights.ffn_norm), weights.gate_up);
    const int64_t hidden = s.model.feed_forward_length;
    residual.addmm_(at::silu(both.narrow(1, 0, hidden)).mul_(both.narrow(1, hidden, hidden)),
                    weights.down);
  });
}

Status TensorPass::read_out(int64_t row_count, float* logits) {
  const State& s = *state_;
  return guarded("compute logits", s.device, [&] {
    const at::Tensor rows = s.x.narrow(0, s.rows - row_count, row_count);
    download(at::mm(s.normalise(rows, s.output_norm), s.output), logits);
  });
}

Status TensorPass::synchronize() {
  const State& s = *state_;
  return guarded("wait for the GPU", s.device, [&] {
    if (s.device.is_cpu()) return;
    c10::impl::VirtualGuardImpl(s.device.type()).getStream(s.device).synchronize();
  });
}

void release_unused([[maybe_unused]] const TorchDevice& device) {
#ifdef POLYKV_CAN_RELEASE_UNUSED
  if (!device.is_cuda) return;
  // A device that does not work any more says so to whoever needs it next.
  static_cast<void>(guarded("release unused memory", at_device(device), [] {
                      c10::getDeviceAllocator(c10::DeviceType::CUDA)->emptyCache();
                    }).is_ok());
#endif
}

Status warm_up_tensors(const TorchDevice& where) {
  constexpr int64_t kDim = 64;
  const at::Device device = at_device(where);
  at::Tensor weights, cache;
  POLYKV_RETURN_IF_ERROR(guarded("use the GPU for the first time", device, [&] {
    const auto type = at::device(device).dtype(at::kFloat);
    weights = at::full({8 * kDim, kDim}, 0.01F, type);
    cache = at::full({2, 32, kDim}, 0.0F, type);
  }));
  const auto* w = weights.data_ptr<float>();
  PassModel model{1, 1, kDim, kDim, kDim, kDim, 1e-5, w, w, w, {{w, w, w, w, w, w}}, 1024};
  const PassCache layer{cache.data_ptr<float>(), cache.data_ptr<float>() + 32 * kDim, 32, 0};
  POLYKV_ASSIGN_OR_RETURN(const std::unique_ptr<TensorPass> pass,
                          TensorPass::create(where, std::move(model)));
  const std::vector<int64_t> ids(32, 1);
  const std::vector<float> angles(32 * kDim / 2, 0.5F);
  std::vector<float> back(32 * kDim);
  POLYKV_RETURN_IF_ERROR(pass->begin_chunk(ids.data(), 32, angles.data(), angles.data()));
  POLYKV_RETURN_IF_ERROR(pass->project(0, layer));
  POLYKV_RETURN_IF_ERROR(pass->copy_queries(16, back.data()));
  POLYKV_RETURN_IF_ERROR(pass->finish_layer(0, layer, 32));
  POLYKV_RETURN_IF_ERROR(pass->read_out(1, back.data()));
  return pass->synchronize();
}

}  // namespace polykv
