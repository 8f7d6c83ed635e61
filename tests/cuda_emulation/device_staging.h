// Copies what a call of kernels/cuda/launch.h points to into the device's memory, and results back.
// Memory: a class whose objects own device memory, Memory(size_bytes), with data(), upload(host bytes)
// and download(host bytes). It has exactly the size that the call may touch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/codec.h"
#include "kernels/cuda/attend_call.h"

namespace polykv::test {

/// A strided tensor's distance and length along an axis.
struct Axis {
  int64_t stride;
  uint64_t count;
};

template <typename Memory>
class Staging {
 public:
  /// The device's copy of `count` elements; null for null.
  template <typename T>
  T* array(T* host, uint64_t count) {
    if (host == nullptr || count == 0) return nullptr;
    return reinterpret_cast<T*>(copy(reinterpret_cast<uintptr_t>(host), count * sizeof(T)));
  }

  /// Of all elements that the axes reach from `host` on.
  void* tensor(const void* host, Dtype dtype, std::initializer_list<Axis> axes) {
    if (host == nullptr) return nullptr;
    const auto element_bytes = static_cast<int64_t>(dtype_size_bytes(dtype));
    int64_t low = 0;
    int64_t high = 1;
    for (const Axis& axis : axes) {
      const int64_t reach = axis.stride * (static_cast<int64_t>(axis.count) - 1);
      (reach < 0 ? low : high) += reach;
    }
    const uintptr_t first =
        reinterpret_cast<uintptr_t>(host) + static_cast<uintptr_t>(low * element_bytes);
    uint8_t* data = copy(first, static_cast<uint64_t>((high - low) * element_bytes));
    return data - low * element_bytes;
  }

  template <typename Layer>
  Layer layer(Layer layer) {
    const LayerGeometry& g = layer.geometry;
    const uint64_t exact_rows = uint64_t{g.kv_head_count} * layer.exact_row_capacity;
    layer.k_means = array(layer.k_means, uint64_t{g.kv_head_count} * g.k_head_dim);
    layer.exact_tokens = array(layer.exact_tokens, layer.exact_row_capacity);
    layer.exact_k = array(layer.exact_k, exact_rows * g.k_head_dim);
    layer.exact_v = array(layer.exact_v, exact_rows * g.v_head_dim);
    layer.blocks = array(layer.blocks, g.kv_head_count * layer.block_count * layer.block_bytes);
    return layer;
  }

  /// Everything as the device left it.
  void download() {
    for (const Copy& copy : copies_)
      copy.memory->download(reinterpret_cast<void*>(copy.host), copy.size_bytes);
  }

 private:
  struct Copy {
    uintptr_t host;
    uint64_t size_bytes;
    std::unique_ptr<Memory> memory;
  };

  uint8_t* copy(uintptr_t host, uint64_t size_bytes) {
    copies_.push_back({host, size_bytes, std::make_unique<Memory>(size_bytes)});
    copies_.back().memory->upload(reinterpret_cast<const void*>(host), size_bytes);
    return static_cast<uint8_t*>(copies_.back().memory->data());
  }

  std::vector<Copy> copies_;
};

template <typename Memory>
DecodeTarget stage(Staging<Memory>& staging, const LayerGeometry& g, DecodeTarget target) {
  const uint64_t tokens = std::max<uint64_t>(target.token_count, 1);
  const auto place = [&](void* data, const Strides& s, uint32_t dims) {
    return staging.tensor(data, target.dtype,
                          {{s.head, g.kv_head_count}, {s.token, tokens}, {s.dim, dims}});
  };
  target.k = place(target.k, target.k_strides, g.k_head_dim);
  target.v = place(target.v, target.v_strides, g.v_head_dim);
  return target;
}

template <typename Memory>
KvSource stage(Staging<Memory>& staging, const LayerGeometry& g, uint64_t tokens, KvSource source) {
  const auto place = [&](const void* data, const Strides& s, uint32_t dims) {
    return staging.tensor(data, source.dtype,
                          {{s.head, g.kv_head_count}, {s.token, tokens}, {s.dim, dims}});
  };
  source.k = place(source.k, source.k_strides, g.k_head_dim);
  source.v = place(source.v, source.v_strides, g.v_head_dim);
  return source;
}

/// `runs` gets the device's runs, and must outlive the call.
template <typename Memory>
cuda::AttendCall stage(Staging<Memory>& staging, cuda::AttendCall call,
                       std::vector<cuda::AttendRun>& runs) {
  const LayerGeometry& g = call.runs[0].layer.geometry;
  runs.assign(call.runs.begin(), call.runs.end());
  for (cuda::AttendRun& run : runs) run.layer = staging.layer(run.layer);
  call.runs = runs;
  const auto place = [&](const void* data, Dtype dtype, const cuda::QueryStrides& s,
                         uint32_t dims) {
    return staging.tensor(data, dtype,
                          {{s.query, call.query_count}, {s.head, call.head_count}, {s.dim, dims}});
  };
  call.q = place(call.q, call.query_dtype, call.q_strides, g.k_head_dim);
  call.output = place(call.output, call.output_dtype, call.output_strides, g.v_head_dim);
  call.query_first_tokens = staging.array(call.query_first_tokens, call.query_count);
  call.log_sum_exp = staging.array(call.log_sum_exp, uint64_t{call.query_count} * call.head_count);
  return call;
}

}  // namespace polykv::test
