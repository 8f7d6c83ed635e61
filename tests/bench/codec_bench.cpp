// Encode and decode rates of each codec against memcpy in the same run. Every codec is first
// checked against the reference; an unverified result is not timed.
//
//   codec_bench [tokens] [layers] [kv_heads] [head_dim]        default: 7639 30 3 64, SmolLM2-135M
//   with GPL-3
//
// Bytes are those of K and V in fp32 outside; one thread; the median of 7 rounds; targets touched
// before.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>

#include "kernels/cpu/ops.h"
#include "tests/support/segments.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr int kRounds = 7;

struct Timing {
  double median_s = 0;
  double best_s = 0;
  double worst_s = 0;
  double cpu_median_s = 0;  // of this thread: what other load on the machine did not take
};

double thread_cpu_s() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

Timing measure(const std::function<void()>& work) {
  std::vector<double> seconds;
  std::vector<double> cpu_seconds;
  for (int round = 0; round < kRounds; ++round) {
    const double cpu_start = thread_cpu_s();
    const auto start = std::chrono::steady_clock::now();
    work();
    cpu_seconds.push_back(thread_cpu_s() - cpu_start);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  std::sort(cpu_seconds.begin(), cpu_seconds.end());
  return {seconds[kRounds / 2], seconds.front(), seconds.back(), cpu_seconds[kRounds / 2]};
}

void report(const char* codec, const char* what, const Timing& timing, double bytes,
            double segment_bytes) {
  std::printf("%-11s %-11s %8.1f ms (%.1f .. %.1f), cpu %6.1f ms %7.2f GB/s", codec, what,
              timing.median_s * 1e3, timing.best_s * 1e3, timing.worst_s * 1e3,
              timing.cpu_median_s * 1e3, bytes / timing.median_s / 1e9);
  if (segment_bytes > 0)
    std::printf("   %.0f segment bytes, %.3fx smaller than bf16", segment_bytes,
                bytes / 2 / segment_bytes);
  std::printf("\n");
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - b[i], 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

/// A short segment, encoded and decoded on both paths: outputs must agree.
bool verified(Profile profile, const LayerGeometry& geometry) {
  const LayerValues values = random_values(geometry, 200, 5);
  const SegmentSpec spec = test_spec(test_model({geometry}), profile, 200);
  SegmentOptions options;
  options.backend = Backend::reference;
  const AlignedBytes reference = build_segment(spec, {values}, options);
  options.backend = Backend::cpu;
  const AlignedBytes cpu = build_segment(spec, {values}, options);
  const LayerValues want = decode_all(open_segment(reference), 0, Backend::reference);
  const LayerValues same = decode_all(open_segment(reference), 0, Backend::cpu);
  const LayerValues again = decode_all(open_segment(cpu), 0, Backend::cpu);
  const bool close = distance(same.k, want.k) < 1e-5 && distance(same.v, want.v) < 1e-5 &&
                     distance(again.k, want.k) < 1e-3 && distance(again.v, want.v) < 1e-3;
  if (!close)
    std::fprintf(stderr, "%s does not agree with the reference: not timed\n",
                 profile_name(profile));
  return close;
}

void bench(Profile profile, const std::vector<LayerValues>& layers, uint32_t layer_count,
           double bytes) {
  const LayerGeometry& geometry = layers[0].geometry;
  const uint64_t tokens = layers[0].token_count;
  const SegmentSpec spec =
      test_spec(test_model(std::vector<LayerGeometry>(layer_count, geometry)), profile, tokens);
  const Result<uint64_t> size = segment_size_bytes(spec);
  if (!size.is_ok()) {
    std::printf("%-11s %s\n", profile_name(profile), size.status().message().c_str());
    return;
  }
  AlignedBytes segment(*size);
  const std::vector<uint32_t> ids = test_ids(tokens);
  const std::vector<Digest> digests(spec.digest_count);
  const auto encode = [&] {
    Result<SegmentWriter> writer =
        SegmentWriter::create(spec, {ids, {}, digests, {}}, segment.span());
    bool ok = writer.is_ok();
    for (uint32_t i = 0; ok && i < layer_count; ++i) {
      ok = writer->encode_layer(i, layers[i % layers.size()].source()).is_ok();
    }
    if (!ok || !writer->finish().is_ok()) std::abort();
  };
  report(profile_name(profile), "encode", measure(encode), bytes, static_cast<double>(*size));

  const SegmentView view = open_segment(segment);
  report(profile_name(profile), "verify", measure([&] {
           if (!view.verify_checksums().is_ok()) std::abort();
         }),
         static_cast<double>(*size), 0);
  // One fp32 cache for all layers, as an agent has it.
  const uint64_t k_size = geometry.kv_head_count * tokens * geometry.k_head_dim;
  const uint64_t v_size = geometry.kv_head_count * tokens * geometry.v_head_dim;
  AlignedBytes memory((k_size + v_size) * layer_count * sizeof(float));
  auto* cache = reinterpret_cast<float*>(memory.span().data());
  const auto decode = [&](Dtype dtype) {
    for (uint32_t i = 0; i < layer_count; ++i) {
      DecodeTarget target;
      target.token_count = tokens;
      target.dtype = dtype;
      const KvSource where = layers[0].source();
      float* base = cache + i * (k_size + v_size);
      target.k = base;
      target.k_strides = where.k_strides;
      target.v = base + k_size;
      target.v_strides = where.v_strides;
      if (!decode_layer(view, i, target).is_ok()) std::abort();
    }
  };
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const std::string what = std::string("decode ") + dtype_name(dtype);
    report(profile_name(profile), what.c_str(), measure([&] { decode(dtype); }),
           bytes * static_cast<double>(dtype_size_bytes(dtype)) / 4, 0);
  }
}

std::string machine() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, uint32_t otherwise) {
    return argc > i ? static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10)) : otherwise;
  };
  const uint64_t tokens = argument(1, 7639);
  const uint32_t layer_count = argument(2, 30);
  const uint32_t dim = argument(4, 64);
  const LayerGeometry geometry{argument(3, 3), dim, dim, 0};
  std::printf("machine: %s; compiler: %s; backend: %s, %s\n", machine().c_str(), __VERSION__,
              active_backend() == Backend::cpu ? "cpu" : "reference", cpu::ops().name);
  std::printf("%llu tokens, %u layers, %u kv_heads, head_dim %u; median (best .. worst) of %d\n",
              static_cast<unsigned long long>(tokens), layer_count, geometry.kv_head_count, dim,
              kRounds);
  // Two different layers stand for all: what is read is larger than the caches either way.
  const std::vector<LayerValues> layers = {random_values(geometry, tokens, 1),
                                           random_values(geometry, tokens, 2)};
  const double bytes =
      4.0 * static_cast<double>(layers[0].k.size() + layers[0].v.size()) * layer_count;
  std::vector<uint8_t> from(static_cast<size_t>(bytes), 1);
  std::vector<uint8_t> to(from.size(), 2);
  report("memcpy", "fp32 bytes", measure([&] { std::memcpy(to.data(), from.data(), from.size()); }),
         bytes, 0);
  bool all = true;
  for (const Profile profile : kAllProfiles) {
    if (verified(profile, geometry)) {
      bench(profile, layers, layer_count, bytes);
    } else {
      all = false;
    }
  }
  return all ? 0 : 1;
}
