// A real polykvd, with documents of Gaussian K and V that were published through libpolykv.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "polykv/polykv.hpp"
#include "tests/bench/polykv_bench/options.h"
#include "tests/support/daemon_process.h"

namespace polykv::bench {

/// As many layers as the options say, or as make options.mib of packed bytes.
Shape shape_of(const Options& options, Profile profile, uint32_t head_dim);

/// More than the document takes under any profile.
uint64_t budget_for(const Shape& shape);

/// K and V of any layer in fp16, dense [token, kv_head, dim]: Gaussian, and each dim of K has an
/// offset of its own, as keys have. A layer's begin some tokens further on than the last one's.
class GaussianLayers {
 public:
  GaussianLayers(const Shape& shape, uint64_t token_count, uint32_t seed);
  const uint16_t* k(uint32_t layer) const { return &k_[size_t{layer} * row_values_]; }
  const uint16_t* v(uint32_t layer) const { return &v_[size_t{layer} * row_values_]; }

 private:
  size_t row_values_;  // of a token
  std::vector<uint16_t> k_;
  std::vector<uint16_t> v_;
};

class Pool {
 public:
  explicit Pool(uint64_t budget_bytes);

  /// Encoded by as many threads as the machine has. The lease goes before the pool does.
  client::Lease publish(const Shape& shape, const std::string& name);
  void remove(const std::string& name) { session_.remove(name).value_or_throw(); }
  client::Session& session() { return session_; }

 private:
  test::DaemonProcess daemon_;
  client::Session session_;
  uint32_t published_count_ = 0;
};

}  // namespace polykv::bench
