#include <algorithm>
#include <random>

#include "tests/bench/polykv_bench/bandwidth.h"
#include "tests/bench/polykv_bench/commands.h"
#include "tests/bench/polykv_bench/gemm.h"
#include "tests/bench/polykv_bench/measure.h"
#include "tests/bench/polykv_bench/pool.h"
#include "tests/bench/polykv_bench/verify.h"

namespace polykv::bench {

namespace {

// The arithmetic's own error; the codecs' is 0.1 and more.
constexpr double kMostError = 0.02;
constexpr uint32_t kGemmFromRows = 16;

struct Case {
  Shape shape;
  uint32_t group;
  uint32_t query_rows;
  uint32_t threads;

  uint32_t heads() const { return shape.kv_heads * group; }
  size_t output_size() const { return size_t{query_rows} * heads() * shape.head_dim; }
};

/// Queries and outputs in fp32, dense [query, head, dim]; the queries' logits have a deviation of 1
/// and more.
class Attention {
 public:
  Attention(const client::Lease& lease, const Case& of)
      : lease_(lease), case_(of), q_(of.output_size()), output_(of.output_size()) {
    std::mt19937 engine(7);
    std::normal_distribution<float> normal;
    for (float& value : q_) value = normal(engine);
    options_.head_count = of.heads();
    options_.query_count = of.query_rows;
    options_.query_dtype = POLYKV_F32;
    options_.q = q_.data();
    options_.output_dtype = POLYKV_F32;
    options_.output = output_.data();
    options_.thread_count = of.threads;
  }

  void attend(uint32_t layer, uint64_t first, uint64_t count) {
    options_.first_token = first;
    options_.token_count = count;
    lease_.attend(layer, options_).value_or_throw();
  }

  /// Of the outputs of the first and the last query in two ranges.
  double error(bool spoils) {
    std::vector<float> got;
    std::vector<float> want;
    for (const Sample& sample : samples_of(case_.shape)) {
      attend(sample.layer, sample.first, sample.count);
      const DecodedRange cache =
          reference_decode(lease_, case_.shape, sample.layer, sample.first, sample.count);
      for (const uint32_t query : {0U, case_.query_rows - 1}) {
        for (uint32_t head = 0; head < case_.heads(); ++head) {
          const size_t at = (size_t{query} * case_.heads() + head) * case_.shape.head_dim;
          const std::vector<float> row =
              reference_attention(cache, case_.shape, head / case_.group, &q_[at]);
          want.insert(want.end(), row.begin(), row.end());
          got.insert(got.end(), &output_[at], &output_[at] + row.size());
        }
      }
    }
    if (spoils) got[0] += 10 * std::abs(*std::max_element(want.begin(), want.end())) + 1;
    return relative_error(got, want);
  }

 private:
  const client::Lease& lease_;
  Case case_;
  client::AttendOptions options_;
  std::vector<float> q_;
  std::vector<float> output_;
};

uint64_t packed_bytes(const client::Lease& lease, const Shape& shape) {
  uint64_t bytes = 0;
  for (uint32_t segment = 0; segment < lease.info().segment_count; ++segment) {
    for (uint32_t layer = 0; layer < shape.layers; ++layer)
      bytes += lease.layer_view(segment, layer).value_or_throw().payload_bytes;
  }
  return bytes;
}

Json measure(const client::Lease& lease, const Case& of, const Options& options,
             const Memory& memory, const Peers& peers) {
  const Shape& shape = of.shape;
  Attention attention(lease, of);
  const double error = attention.error(options.spoils);
  require_close(std::string("attention to ") + profile_name(shape.profile), error, kMostError);
  const auto step = [&] {
    for (uint32_t layer = 0; layer < shape.layers; ++layer)
      attention.attend(layer, 0, shape.tokens);
  };
  step();
  Rounds rounds;
  std::vector<double> gemm_s;
  for (uint32_t i = 0; i < options.rounds; ++i) {
    rounds.read.push_back(memory.read());
    rounds.seconds.push_back(seconds_of(of.threads, step));
    if (of.query_rows >= kGemmFromRows)
      gemm_s.push_back(gemm_layer_s(shape, of.query_rows * of.group, of.threads) * shape.layers);
  }
  Json row = make_row("attend", shape, of.threads, rounds);
  row["group"] = of.group;
  row["query_rows"] = of.query_rows;
  row["error"] = error;
  const auto bytes = static_cast<double>(packed_bytes(lease, shape));
  row["read_bandwidth_fraction"] = rounds.median_with(
      rounds.read, [&](double seconds, double rate) { return bytes / seconds / rate; });
  row["vs_fp16_roofline"] = rounds.median_with(rounds.read, [&](double seconds, double rate) {
    return shape.values() * 2 / rate / seconds;
  });
  const double ns = row["ns_per_token_kv_head"];
  for (const char* dtype : {"bf16", "f32"}) {
    const auto peer_ns = peers.attention_ns(dtype, shape, of.group, of.query_rows, of.threads);
    if (peer_ns) row[std::string("vs_torch_") + dtype] = *peer_ns / ns;
  }
  row["vs_f32_gemm"] = nullptr;
  if (!gemm_s.empty() && gemm_s[0] > 0) {
    row["vs_f32_gemm"] =
        rounds.median_with(gemm_s, [](double seconds, double gemm) { return gemm / seconds; });
  }
  return row;
}

}  // namespace

void bench_attend(const Options& options, Report& report) {
  report.set_columns({"codec", "head_dim", "group", "query_rows", "tokens", "threads", "path",
                      "error", "median_ms", "least_ms", "most_ms", "ns_per_token_kv_head",
                      "read_bandwidth_fraction", "vs_fp16_roofline", "vs_torch_bf16",
                      "vs_torch_f32", "vs_f32_gemm"});
  const Peers peers(options.peers_path);
  for (const uint32_t head_dim : options.head_dims) {
    for (const std::string& codec : options.codecs) {
      const Shape shape = shape_of(options, profile_from_name(codec).value(), head_dim);
      Pool pool(budget_for(shape));
      const client::Lease lease = pool.publish(shape, codec);
      for (const uint32_t threads : options.threads) {
        const Memory memory(threads, options.memory_bytes());
        for (const uint32_t query_rows : options.query_rows) {
          for (const uint32_t group : options.groups) {
            report.add(measure(lease, {shape, group, query_rows, threads}, options, memory, peers));
          }
        }
      }
    }
  }
}

}  // namespace polykv::bench
