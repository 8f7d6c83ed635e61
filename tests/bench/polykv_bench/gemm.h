// fp32 matrix products by OpenBLAS, found at run time: the yardstick of attention with many query
// rows.
#pragma once

#include <cstdint>

#include "tests/bench/polykv_bench/options.h"

namespace polykv::bench {

/// Seconds that the two products of attention take as plain fp32 matrices: of `rows` queries with
/// the keys of shape.tokens tokens, and of their weights with the values, for all kv_heads of one
/// layer. 0: there is no OpenBLAS on this machine.
double gemm_layer_s(const Shape& shape, uint32_t rows, uint32_t threads);

}  // namespace polykv::bench
