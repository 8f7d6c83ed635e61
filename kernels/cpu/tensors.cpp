#include "kernels/cpu/tensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace polykv::cpu {

namespace {
constexpr size_t kLineBytes = 64;
}

void load_row(Dtype dtype, const void* row, float* out, uint32_t count) {
  if (dtype == Dtype::f32) {
    std::memcpy(out, row, count * sizeof(float));
  } else if (dtype == Dtype::f16) {
    ops().f32_from_f16(static_cast<const uint16_t*>(row), out, count);
  } else {
    ops().f32_from_bf16(static_cast<const uint16_t*>(row), out, count);
  }
}

void store_row(Dtype dtype, const float* row, void* out, uint32_t count) {
  if (dtype == Dtype::f32) {
    std::memcpy(out, row, count * sizeof(float));
  } else if (dtype == Dtype::f16) {
    ops().f16_from_f32(row, static_cast<uint16_t*>(out), count);
  } else {
    ops().bf16_from_f32(row, static_cast<uint16_t*>(out), count);
  }
}

Rows BlockReader::read(uint32_t head, uint64_t first_token, uint32_t count) {
  const Strides& strides = source_.strides;
  const uint32_t dims = source_.head_dim;
  const uint8_t* expected = std::exchange(expected_, nullptr);
  if (source_.dtype == Dtype::f32 && strides.dim == 1) {
    return {reinterpret_cast<const float*>(element(head, first_token, 0)), strides.token, count,
            dims};
  }
  if (strides.dim == 1) {
    const size_t row_bytes = dims * dtype_size_bytes(source_.dtype);
    const int64_t step_bytes =
        strides.token * static_cast<int64_t>(dtype_size_bytes(source_.dtype));
    for (uint32_t i = 0; i < count; ++i) {
      for (size_t at = 0; expected != nullptr && at < row_bytes; at += kLineBytes)
        __builtin_prefetch(expected + i * step_bytes + at);
      load_row(source_.dtype, element(head, first_token + i, 0), &scratch_[size_t{i} * dims], dims);
    }
  } else {
    // Tokens in the inner loop: a transposed V has them side by side.
    for (uint32_t dim = 0; dim < dims; ++dim) {
      for (uint32_t i = 0; i < count; ++i) {
        scratch_[size_t{i} * dims + dim] = source_.at(head, first_token + i, dim);
      }
    }
  }
  return {scratch_.data(), static_cast<int64_t>(dims), count, dims};
}

void BlockWriter::store(uint32_t head, uint64_t token, uint32_t low, uint32_t high) {
  const uint32_t dims = target_.head_dim;
  if (target_.strides.dim == 1) {
    for (uint32_t i = low; i < high; ++i) {
      const int64_t index = reference::element_index(target_.strides, head, token + i - low, 0);
      store_row(target_.dtype, &scratch_[size_t{i} * dims],
                static_cast<uint8_t*>(target_.data) +
                    index * static_cast<int64_t>(dtype_size_bytes(target_.dtype)),
                dims);
    }
    return;
  }
  for (uint32_t dim = 0; dim < dims; ++dim) {
    for (uint32_t i = low; i < high; ++i) {
      target_.put(head, token + i - low, dim, scratch_[size_t{i} * dims + dim]);
    }
  }
}

}  // namespace polykv::cpu
