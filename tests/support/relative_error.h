// How far values are from those expected.
#pragma once

#include <cassert>
#include <cmath>
#include <cstddef>
#include <vector>

namespace polykv::test {

inline double square(double value) {
  return value *
         value;  // tests are not optimised: std::pow would be a third of what some of them do
}

/// Norm of the difference / norm of what is expected. NaN where that is zero, or where any value is NaN, which no
/// comparison takes for small.
template <typename T>
double relative_error(const T* got, const T* want, size_t count) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < count; ++i) {
    difference += square(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    norm += square(static_cast<double>(want[i]));
  }
  return std::sqrt(difference / norm);
}

template <typename T>
double relative_error(const std::vector<T>& got, const std::vector<T>& want) {
  assert(got.size() == want.size());
  return relative_error(got.data(), want.data(), want.size());
}

}  // namespace polykv::test
