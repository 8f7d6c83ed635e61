#include "tests/bench/polykv_bench/pool.h"

#include <algorithm>
#include <random>
#include <thread>

#include "kernels/codec.h"
#include "kernels/half.h"
#include "tests/bench/polykv_bench/measure.h"

namespace polykv::bench {

namespace {

constexpr uint64_t kSegmentTokens = 4096;

client::Session connect(const std::string& socket_path) {
  client::ConnectOptions options;
  options.socket_path = socket_path.c_str();
  return client::Session::connect(options).value_or_throw();
}

void publish_segment(client::Publisher& publisher, const Shape& shape, uint32_t seed) {
  const uint64_t count = std::min<uint64_t>(kSegmentTokens, shape.tokens - publisher.next_token());
  client::Segment segment = publisher.begin_segment(count).value_or_throw();
  const GaussianLayers values(shape, count, seed);
  const uint32_t threads = std::max(1U, std::thread::hardware_concurrency());
  on_threads(threads, [&](uint32_t thread) {
    for (uint32_t layer = thread; layer < shape.layers; layer += threads) {
      client::KvSource source;
      source.dtype = POLYKV_F16;
      source.k = values.k(layer);
      source.v = values.v(layer);
      segment.encode_layer(layer, source).value_or_throw();
    }
  });
  segment.commit().value_or_throw();
}

}  // namespace

Shape shape_of(const Options& options, Profile profile, uint32_t head_dim) {
  Shape shape{profile, head_dim, options.kv_heads, options.layers, options.tokens};
  if (shape.layers != 0) return shape;
  const uint64_t blocks = (options.tokens + kBlockTokens - 1) / kBlockTokens * options.kv_heads;
  const uint64_t layer_bytes =
      blocks * codec_for(profile)->block_bytes(profile, shape.geometry(), Dtype::f16);
  const uint64_t wanted = uint64_t{options.mib} << 20;
  shape.layers = static_cast<uint32_t>(
      std::clamp<uint64_t>((wanted + layer_bytes - 1) / layer_bytes, 1, kMaxLayers));
  return shape;
}

uint64_t budget_for(const Shape& shape) {
  return static_cast<uint64_t>(shape.values() * 4) + (uint64_t{64} << 20);
}

GaussianLayers::GaussianLayers(const Shape& shape, uint64_t token_count, uint32_t seed)
    : row_values_(size_t{shape.kv_heads} * shape.head_dim) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> offsets(row_values_);
  for (float& offset : offsets) offset = 3 * normal(engine);
  const size_t count = (token_count + shape.layers) * row_values_;
  k_.reserve(count);
  v_.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    k_.push_back(f16_from_f32(normal(engine) + offsets[i % row_values_]));
    v_.push_back(f16_from_f32(normal(engine)));
  }
}

Pool::Pool(uint64_t budget_bytes)
    : daemon_({"--budget", std::to_string(budget_bytes)}),
      session_(connect(daemon_.socket_path())) {}

client::Lease Pool::publish(const Shape& shape, const std::string& name) {
  const std::vector<polykv_layer_geometry> layers(
      shape.layers, {shape.kv_heads, shape.head_dim, shape.head_dim, 0});
  client::Model model;
  model.name = "gaussian";
  model.source_dtype = POLYKV_F16;
  model.layer_count = shape.layers;
  model.layers = layers.data();
  std::vector<uint32_t> tokens(shape.tokens);
  for (uint64_t i = 0; i < shape.tokens; ++i) tokens[i] = static_cast<uint32_t>(i % 50'000);
  client::AcquireOptions options;
  options.model = &model;
  options.tokens = tokens.data();
  options.token_count = tokens.size();
  options.profile = static_cast<polykv_profile>(shape.profile);
  options.publish_name = name.c_str();
  auto acquired = session_.acquire_or_produce(options).value_or_throw();
  auto& publisher = std::get<client::Publisher>(acquired);
  while (publisher.next_token() < shape.tokens)
    publish_segment(publisher, shape, ++published_count_);
  return publisher.finish_with_lease().value_or_throw();
}

}  // namespace polykv::bench
