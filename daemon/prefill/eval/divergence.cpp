#include "daemon/prefill/eval/divergence.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <thread>

namespace polykv::eval {

namespace {

double log_sum_exp(std::span<const float> logits) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - largest));
  return static_cast<double>(largest) + std::log(sum);
}

size_t top(std::span<const float> logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

PositionScore score(std::span<const float> want, std::span<const float> got, uint32_t next_id) {
  const double want_sum = log_sum_exp(want);
  const double got_sum = log_sum_exp(got);
  PositionScore result;
  for (size_t id = 0; id < want.size(); ++id) {
    const double difference = static_cast<double>(want[id]) - static_cast<double>(got[id]);
    result.kld +=
        std::exp(static_cast<double>(want[id]) - want_sum) * (difference - (want_sum - got_sum));
  }
  const double next_difference =
      static_cast<double>(want[next_id]) - static_cast<double>(got[next_id]);
  result.loss_change = next_difference - (want_sum - got_sum);
  result.loss = want_sum - static_cast<double>(want[next_id]);
  result.same_top = top(want) == top(got);
  return result;
}

}  // namespace

std::vector<PositionScore> score_positions(std::span<const float> want, std::span<const float> got,
                                           std::span<const uint32_t> next_ids,
                                           uint32_t thread_count) {
  assert(want.size() == got.size() && !next_ids.empty());
  const size_t vocabulary = want.size() / next_ids.size();
  std::vector<PositionScore> scores(next_ids.size());
  const auto work = [&](size_t first) {
    for (size_t i = first; i < scores.size(); i += thread_count) {
      scores[i] = score(want.subspan(i * vocabulary, vocabulary),
                        got.subspan(i * vocabulary, vocabulary), next_ids[i]);
    }
  };
  std::vector<std::jthread> threads;
  for (uint32_t i = 1; i < thread_count; ++i) threads.emplace_back(work, i);
  work(0);
  threads.clear();
  return scores;
}

Summary summarise(std::span<const PositionScore> scores) {
  assert(!scores.empty());
  const auto count = static_cast<double>(scores.size());
  Summary summary;
  std::vector<double> divergences;
  double loss_change = 0;
  double loss = 0;
  for (const PositionScore& position : scores) {
    divergences.push_back(position.kld);
    summary.kld_mean += position.kld / count;
    summary.top1 += (position.same_top ? 1 : 0) / count;
    loss_change += position.loss_change / count;
    loss += position.loss / count;
  }
  double variance = 0;
  for (const PositionScore& position : scores) {
    variance += std::pow(position.loss_change - loss_change, 2) / std::max(1.0, count - 1);
  }
  std::sort(divergences.begin(), divergences.end());
  const auto quantile = [&](double fraction) {
    const double rank = std::ceil(fraction * count);
    return divergences[static_cast<size_t>(std::max(rank, 1.0)) - 1];
  };
  summary.kld_median = quantile(0.5);
  summary.kld_p999 = quantile(0.999);
  summary.ppl_exact = std::exp(loss);
  summary.ppl_change_percent = 100 * std::expm1(loss_change);
  // The change is close to the change of the mean loss, and its error to that of the mean.
  summary.ppl_stderr = 100 * std::exp(loss_change) * std::sqrt(variance / count);
  return summary;
}

}  // namespace polykv::eval
