// What a run found, as JSON rows and as a table of them; and what other programs took.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tests/bench/polykv_bench/options.h"

namespace polykv::bench {

using Json = nlohmann::ordered_json;

/// The rounds of one row: seconds of the work, and the yardsticks that were measured in between.
struct Rounds {
  std::vector<double> seconds;
  std::vector<double> read;   // bytes per second
  std::vector<double> write;  // the faster of memcpy and a non-temporal fill
  /// The median over rounds of what `seconds` and a yardstick of the same round give.
  template <typename Of>
  double median_with(const std::vector<double>& yardstick, Of of) const;
};

/// What all rows have: the names of docs/benchmarks.md, nulls where nothing was measured.
Json make_row(const char* operation, const Shape& shape, uint32_t threads, const Rounds& rounds);

/// Figures of scripts/bench-peers. Nothing where the file was not given or has no such row.
class Peers {
 public:
  explicit Peers(const std::string& path);
  /// ns per token and kv_head of torch's attention.
  std::optional<double> attention_ns(const char* dtype, const Shape& shape, uint32_t group,
                                     uint32_t query_rows, uint32_t threads) const;
  /// Seconds in which a program ("llama.cpp", "polykv-llm") restores a document of this shape.
  std::optional<double> restore_s(const char* program, const Shape& shape) const;

 private:
  Json rows_ = Json::array();
};

class Report {
 public:
  explicit Report(const Options& options);
  /// `columns`: of the table, in order; keys of the rows.
  void set_columns(std::vector<std::string> columns) { columns_ = std::move(columns); }
  void set(const char* key, Json value) { head_[key] = std::move(value); }
  void add(Json row) { rows_.push_back(std::move(row)); }
  void print() const;

 private:
  bool as_json_;
  std::vector<std::string> columns_;
  Json head_;
  std::vector<Json> rows_;
};

/// Throws when a result is further from the reference than it may be: it is not timed then.
void require_close(const std::string& what, double error, double most);

template <typename Of>
double Rounds::median_with(const std::vector<double>& yardstick, Of of) const {
  std::vector<double> values;
  for (size_t i = 0; i < seconds.size(); ++i) values.push_back(of(seconds[i], yardstick[i]));
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace polykv::bench
