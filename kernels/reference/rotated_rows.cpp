#include "kernels/reference/rotated_rows.h"

#include <cmath>
#include <limits>

#include "kernels/codebooks.h"

namespace polykv::reference {

namespace {

void turn_signs(std::vector<double>& row) {
  for (uint32_t dim = 0; dim < row.size(); ++dim) {
    if (rotation_turns(dim)) row[dim] = -row[dim];
  }
}

/// Its own inverse.
void walsh_hadamard(double* values, uint32_t count) {
  for (uint32_t half = 1; half < count; half *= 2) {
    for (uint32_t i = 0; i < count; ++i) {
      if ((i & half) != 0) continue;
      const double a = values[i];
      const double b = values[i + half];
      values[i] = a + b;
      values[i + half] = a - b;
    }
  }
  for (uint32_t i = 0; i < count; ++i) values[i] /= std::sqrt(count);
}

void transform_blocks(std::vector<double>& row) {
  for_each_rotation_block(static_cast<uint32_t>(row.size()), [&](uint32_t first, uint32_t count) {
    walsh_hadamard(&row[first], count);
  });
}

double product(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// The lower one of two that are equally near.
uint32_t nearest_code(double value, const Codebook& book) {
  uint32_t best = 0;
  for (uint32_t code = 1; code < book.size; ++code) {
    if (std::abs(value - book.levels[code]) < std::abs(value - book.levels[best])) best = code;
  }
  return best;
}

std::vector<double> levels_of(const std::vector<uint32_t>& codes, const Codebook& book) {
  std::vector<double> levels;
  levels.reserve(codes.size());
  for (const uint32_t code : codes) levels.push_back(book.levels[code]);
  return levels;
}

}  // namespace

void rotate(std::vector<double>& row, const TensorRule& rule) {
  if (rule.turns_signs) turn_signs(row);
  transform_blocks(row);
}

void rotate_back(std::vector<double>& row, const TensorRule& rule) {
  transform_blocks(row);
  if (rule.turns_signs) turn_signs(row);
}

CodedRow code_row(std::vector<double> row, const TensorRule& rule) {
  const Codebook& book = codebook(rule.bits);
  const double energy = product(row, row);
  CodedRow result;
  result.codes.assign(row.size(), 0);
  if (energy == 0) return result;
  rotate(row, rule);
  const double expected = std::sqrt(energy / static_cast<double>(row.size())) / book.unit;
  double least_error = std::numeric_limits<double>::infinity();
  for (uint32_t i = 0; i < kScaleCandidates; ++i) {
    const double scale = book.scale(i) * expected;
    std::vector<uint32_t> codes;
    double error = 0;
    for (const double value : row) {
      codes.push_back(nearest_code(value / scale, book));
      error += std::pow(value - scale * book.levels[codes.back()], 2);
    }
    if (error < least_error) {
      least_error = error;
      result.codes = std::move(codes);
    }
  }
  // Unbiased: the decoded row's product with the row itself is the row's own square. Attention adds
  // up many rows, where independent errors average out and a gain that is too small does not.
  result.gain = energy / product(row, levels_of(result.codes, book));
  return result;
}

}  // namespace polykv::reference
