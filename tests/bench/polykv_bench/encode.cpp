#include <algorithm>

#include "common/digest.h"
#include "kernels/segment.h"
#include "tests/bench/polykv_bench/bandwidth.h"
#include "tests/bench/polykv_bench/commands.h"
#include "tests/bench/polykv_bench/measure.h"
#include "tests/bench/polykv_bench/pool.h"
#include "tests/bench/polykv_bench/verify.h"
#include "tests/support/segments.h"

namespace polykv::bench {

namespace {

// Two paths may differ in a code where two scales or levels are equally near.
constexpr double kMostError = 2e-3;
constexpr uint64_t kVerifiedTokens = 300;

/// One segment in memory of its own that was touched before.
class Target {
 public:
  Target(const Shape& shape, uint64_t token_count)
      : spec_(test::test_spec(
            test::test_model(std::vector<LayerGeometry>(shape.layers, shape.geometry()),
                             Dtype::f16),
            shape.profile, token_count)),
        ids_(test::test_ids(token_count)),
        digests_(spec_.digest_count),
        bytes_(segment_size_bytes(spec_).value()) {}

  void encode(const Shape& shape, const GaussianLayers& values, uint32_t threads, Backend backend) {
    Result<SegmentWriter> writer =
        SegmentWriter::create(spec_, {ids_, {}, digests_, {}}, bytes_.span());
    require(writer.status());
    const Strides strides{shape.head_dim, int64_t{shape.kv_heads} * shape.head_dim, 1};
    on_threads(threads, [&](uint32_t thread) {
      for (uint32_t layer = thread; layer < shape.layers; layer += threads) {
        require(writer->encode_layer(
            layer, {Dtype::f16, values.k(layer), strides, values.v(layer), strides}, {}, backend));
      }
    });
    require(writer->finish());
  }
  test::LayerValues decode(uint32_t layer) const {
    return test::decode_all(test::open_segment(bytes_), layer, Backend::reference);
  }
  size_t size_bytes() const { return bytes_.span().size(); }

 private:
  static void require(const Status& status) {
    if (!status.is_ok()) throw std::runtime_error(status.message());
  }

  SegmentSpec spec_;
  std::vector<uint32_t> ids_;
  std::vector<Digest> digests_;
  test::AlignedBytes bytes_;
};

/// Of what both encoders' codes decode to.
double error_of(const Shape& shape, bool spoils) {
  Shape small = shape;
  small.layers = 1;
  small.tokens = std::min(shape.tokens, kVerifiedTokens);
  const GaussianLayers values(small, small.tokens, 3);
  Target got(small, small.tokens);
  got.encode(small, values, 1, active_backend());
  Target want(small, small.tokens);
  want.encode(small, values, 1, Backend::reference);
  test::LayerValues decoded = got.decode(0);
  if (spoils) decoded.k[0] = 1e4F;
  const test::LayerValues wanted = want.decode(0);
  return std::max(relative_error(decoded.k, wanted.k), relative_error(decoded.v, wanted.v));
}

}  // namespace

void bench_encode(const Options& options, Report& report) {
  report.set_columns({"codec", "head_dim", "tokens", "layers", "threads", "path", "error",
                      "median_ms", "least_ms", "most_ms", "ns_per_token_kv_head", "input_gb_per_s",
                      "input_gb_per_s_core", "input_over_packed_bytes"});
  for (const uint32_t head_dim : options.head_dims) {
    for (const std::string& codec : options.codecs) {
      const Shape shape = shape_of(options, profile_from_name(codec).value(), head_dim);
      const double error = error_of(shape, options.spoils);
      require_close("encoding " + codec, error, kMostError);
      const GaussianLayers values(shape, shape.tokens, 1);
      Target target(shape, shape.tokens);
      for (const uint32_t threads : options.threads) {
        const auto whole = [&] { target.encode(shape, values, threads, active_backend()); };
        whole();
        Rounds rounds;
        for (uint32_t i = 0; i < options.rounds; ++i)
          rounds.seconds.push_back(seconds_of(threads, whole));
        Json row = make_row("encode", shape, threads, rounds);
        row["error"] = error;
        const double rate = shape.values() * 2 / row["median_ms"].get<double>() / 1e6;
        row["input_gb_per_s"] = rate;
        row["input_gb_per_s_core"] = rate / threads;
        row["input_over_packed_bytes"] =
            shape.values() * 2 / static_cast<double>(target.size_bytes());
        report.add(std::move(row));
      }
    }
  }
}

}  // namespace polykv::bench
