// Matrix products by libtorch on plain memory. The one place that knows torch; all matrices are
// row-major and dense.
#pragma once

#include <cstdint>

namespace polykv {

enum class Store { overwrite, add };

/// y[rows, out] = or += x[rows, in] * w[out, in]^T. One row is a matrix-vector product.
void multiply_transposed(const float* x, const float* w, float* y, int64_t rows, int64_t out,
                         int64_t in, Store store);

/// y[rows, columns] += x[rows, inner] * w[inner, columns].
void multiply_add(const float* x, const float* w, float* y, int64_t rows, int64_t columns,
                  int64_t inner);

/// Both may be called from several threads of one OpenMP team; inside a team each call uses one
/// thread. Each thread that calls them first makes a scope of this kind (it turns gradient
/// bookkeeping off).
class BlasScope {
 public:
  BlasScope();
  ~BlasScope();
  BlasScope(const BlasScope&) = delete;
  BlasScope& operator=(const BlasScope&) = delete;

 private:
  void* guard_;
};

/// Threads that ATen and its BLAS use when the calling thread multiplies outside a team.
void set_blas_threads(uint32_t thread_count);

/// Does once what libtorch, its BLAS and OpenMP do lazily: they read /proc and /sys at their first
/// use.
void warm_up_blas();

}  // namespace polykv
