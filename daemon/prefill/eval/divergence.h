// How far next-token distributions are from those of the uncompressed cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace polykv::eval {

/// One distribution against another, for the token that came next.
struct PositionScore {
  double kld = 0;          // nats: of `got` from `want`
  double loss_change = 0;  // nats: -log p(token) of `got` minus that of `want`
  double loss = 0;         // nats: -log p(token) of `want`
  bool same_top = false;   // the most probable token is the same
};

/// Logits are [position, vocabulary]; next_ids is the token that followed each position.
std::vector<PositionScore> score_positions(std::span<const float> want, std::span<const float> got,
                                           std::span<const uint32_t> next_ids,
                                           uint32_t thread_count);

struct Summary {
  double kld_mean = 0;
  double kld_median = 0;
  double kld_p999 = 0;  // 99.9 % of the positions are at most this
  double top1 = 0;      // fraction of the positions
  double ppl_change_percent = 0;
  double ppl_exact = 0;   // with the uncompressed cache
  double ppl_stderr = 0;  // of the change, in per cent
};
/// At least one position.
Summary summarise(std::span<const PositionScore> scores);

}  // namespace polykv::eval
