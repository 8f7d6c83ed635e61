#include "daemon/prefill/transformer/blas.h"

#include <ATen/Parallel.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/addmv.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/softmax.h>
#include <c10/core/InferenceMode.h>

#include <exception>

namespace polykv {

namespace {

/// A view of memory that torch only reads when it is an operand.
at::Tensor view(const float* data, at::IntArrayRef shape) {
  return at::from_blob(const_cast<float*>(data), shape, at::kFloat);
}

}  // namespace

void multiply_transposed(const float* x, const float* w, float* y, int64_t rows, int64_t out,
                         int64_t in, Store store) {
  const at::Tensor weight = view(w, {out, in});
  if (rows == 1) {
    at::Tensor result = view(y, {out});
    if (store == Store::add) {
      at::addmv_out(result, result, weight, view(x, {in}));
    } else {
      at::mv_out(result, weight, view(x, {in}));
    }
    return;
  }
  at::Tensor result = view(y, {rows, out});
  if (store == Store::add) {
    at::addmm_out(result, result, view(x, {rows, in}), weight.t());
  } else {
    at::mm_out(result, view(x, {rows, in}), weight.t());
  }
}

void multiply_add(const float* x, const float* w, float* y, int64_t rows, int64_t columns,
                  int64_t inner) {
  at::Tensor result = view(y, {rows, columns});
  at::addmm_out(result, result, view(x, {rows, inner}), view(w, {inner, columns}));
}

BlasScope::BlasScope() : guard_(new c10::InferenceMode()) {}
BlasScope::~BlasScope() {
  delete static_cast<c10::InferenceMode*>(guard_);
}

void set_blas_threads(uint32_t thread_count) {
  at::set_num_threads(static_cast<int>(thread_count));
}

void warm_up_blas() {
  const BlasScope scope;
  // Large enough that every thread gets work.
  const at::Tensor matrix = at::full({512, 512}, 0.5F);
  const at::Tensor product = at::softmax(at::matmul(matrix, matrix), -1);
  at::parallel_for(0, 1 << 20, 1, [](int64_t, int64_t) {});
  // The unwinder finds its tables with the first exception.
  try {
    static_cast<void>(product.view({3, 5}));
  } catch (const std::exception&) {
  }
}

}  // namespace polykv
