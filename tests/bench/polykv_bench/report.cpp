#include "tests/bench/polykv_bench/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <stdexcept>

#include "kernels/codec.h"
#include "kernels/cpu/ops.h"
#include "tests/bench/polykv_bench/measure.h"

namespace polykv::bench {

namespace {

std::string machine() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

std::string load_average() {
  std::ifstream file("/proc/loadavg");
  std::string one_minute;
  file >> one_minute;
  return one_minute;
}

std::string path_name() {
  return active_backend() == Backend::reference ? "reference" : cpu::ops().name;
}

std::string cell(const Json& row, const std::string& column) {
  const auto found = row.find(column);
  if (found == row.end() || found->is_null()) return "-";
  if (found->is_string()) return found->get<std::string>();
  if (!found->is_number_float()) return found->dump();
  const auto value = found->get<double>();
  char text[32];
  std::snprintf(text, sizeof text, std::abs(value) < 0.01 ? "%.2g" : "%.3g", value);
  if (std::abs(value) >= 1000) std::snprintf(text, sizeof text, "%.0f", value);
  return text;
}

}  // namespace

Json make_row(const char* operation, const Shape& shape, uint32_t threads, const Rounds& rounds) {
  const auto [least, most] = std::minmax_element(rounds.seconds.begin(), rounds.seconds.end());
  const double median = median_of(rounds.seconds);
  return {{"operation", operation},
          {"codec", profile_name(shape.profile)},
          {"head_dim", shape.head_dim},
          {"group", nullptr},
          {"query_rows", nullptr},
          {"tokens", shape.tokens},
          {"kv_heads", shape.kv_heads},
          {"layers", shape.layers},
          {"threads", threads},
          {"path", path_name()},
          {"rounds", rounds.seconds.size()},
          {"median_ms", median * 1e3},
          {"least_ms", *least * 1e3},
          {"most_ms", *most * 1e3},
          {"ns_per_token_kv_head", median * 1e9 / shape.rows()},
          {"read_bandwidth_fraction", nullptr},
          {"vs_fp16_roofline", nullptr},
          {"vs_torch_bf16", nullptr}};
}

Peers::Peers(const std::string& path) {
  if (path.empty()) return;
  std::ifstream file(path);
  if (!file) throw std::runtime_error("read --peers " + path + ": it cannot be opened");
  rows_ = Json::parse(file).at("rows");
}

std::optional<double> Peers::attention_ns(const char* dtype, const Shape& shape, uint32_t group,
                                          uint32_t query_rows, uint32_t threads) const {
  for (const Json& row : rows_) {
    if (row["operation"] == "attention" && row["dtype"] == dtype &&
        row["head_dim"] == shape.head_dim && row["group"] == group &&
        row["query_rows"] == query_rows && row["tokens"] == shape.tokens &&
        row["threads"] == threads) {
      return row["ns_per_token_kv_head"].get<double>();
    }
  }
  return std::nullopt;
}

std::optional<double> Peers::restore_s(const char* program, const Shape& shape) const {
  for (const Json& row : rows_) {
    if (row["operation"] == "restore" && row["program"] == program &&
        row["head_dim"] == shape.head_dim && row["kv_heads"] == shape.kv_heads &&
        row["layers"] == shape.layers && row["tokens"] == shape.tokens) {
      return row["median_ms"].get<double>() / 1e3;
    }
  }
  return std::nullopt;
}

Report::Report(const Options& options) : as_json_(options.as_json) {
  head_["machine"] = machine();
  head_["compiler"] = __VERSION__;
  head_["path"] = path_name();
  head_["load"] = load_average();
  head_["clock"] = options.cpu_time ? "cpu" : "wall";
}

void Report::print() const {
  if (as_json_) {
    Json whole = head_;
    whole["rows"] = rows_;
    std::printf("%s\n", whole.dump(2).c_str());
    return;
  }
  for (const auto& [key, value] : head_.items())
    std::printf("%s: %s\n", key.c_str(), cell(head_, key).c_str());
  std::vector<std::vector<std::string>> lines = {columns_};
  for (const Json& row : rows_) {
    auto& line = lines.emplace_back();
    for (const std::string& column : columns_) line.push_back(cell(row, column));
  }
  for (const auto& line : lines) {
    for (size_t i = 0; i < columns_.size(); ++i) {
      size_t width = 0;
      for (const auto& other : lines) width = std::max(width, other[i].size());
      std::printf("%*s%s", static_cast<int>(width), line[i].c_str(),
                  i + 1 < columns_.size() ? "  " : "\n");
    }
  }
}

void require_close(const std::string& what, double error, double most) {
  if (error <= most) return;  // false for a NaN as well
  char text[64];
  std::snprintf(text, sizeof text, "%.3g away, at most %.3g is right", error, most);
  throw std::runtime_error("verify " + what + " against the reference: " + text +
                           "; it is not timed");
}

}  // namespace polykv::bench
