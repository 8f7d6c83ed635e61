// The last queries of a prefill, by which the encoding of its K and V is judged.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/prefill/transformer/transformer.h"
#include "kernels/certificate.h"

namespace polykv {

/// Keeps, for each layer, the queries of the last kCertificateQueries positions that it was shown.
/// For one thread; of() for any while nothing is kept.
class LastQueries {
 public:
  explicit LastQueries(const ModelConfig& config);

  /// For ForwardOptions::after_rope. Positions that do not go on where the last ones ended begin
  /// anew.
  void keep(const LayerRows& rows);
  /// Those of positions in [first_token, end of what was kept). No rows where there are none.
  /// Borrowed until more are kept.
  LayerQueries of(uint32_t layer, uint64_t first_token) const;

  static uint64_t size_bytes(const ModelConfig& config);

 private:
  struct Kept {
    uint64_t end = 0;  // behind the last position
    uint32_t count = 0;
  };
  uint32_t head_count_;
  uint32_t head_dim_;
  std::vector<Kept> kept_;  // [layer]
  std::vector<float> q_;    // [layer, kCertificateQueries, head, head_dim]
};

}  // namespace polykv
