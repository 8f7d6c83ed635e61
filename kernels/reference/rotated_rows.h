// Rows of 3 to 6 bits: rotation, choice of scale, codes and gain, one row at a time in double.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/profiles.h"

namespace polykv::reference {

/// Orthonormal, and its inverse.
void rotate(std::vector<double>& row, const TensorRule& rule);
void rotate_back(std::vector<double>& row, const TensorRule& rule);

struct CodedRow {
  std::vector<uint32_t> codes;
  double gain = 0;  // 0 for a row of zeros, whose codes are 0 as well
};
/// `row` is as it was before its rotation.
CodedRow code_row(std::vector<double> row, const TensorRule& rule);

}  // namespace polykv::reference
