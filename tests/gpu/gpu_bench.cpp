// gpu_bench: how fast the kernels encode, decode, attend and make checksums on this GPU, as fractions of a device-to-device copy measured
// in the same run. Each kernel's result is compared with the CPU's before anything of its profile is timed; a wrong one
// is told, nothing of that profile is timed, and the exit code is 1 at the end. No GPU: 77. The JSON is written
// anew after each row.
//
//   gpu_bench [--json FILE] [--tokens 8192,32768,131072] [--profiles k5v4,...] [--rounds N] [--mib N]
//
// Layers of one document, as many as make --mib packed bytes, so that no cache holds them: 8 kv_heads, head_dim 128,
// heads in groups of 4, fp16.
#include <cuda_runtime_api.h>
#include <xxhash.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "kernels/attend.h"
#include "kernels/cuda/launch.h"
#include "kernels/half.h"
#include "kernels/segment.h"
#include "libclient/cuda/on_device.h"

using namespace polykv;

namespace {

constexpr LayerGeometry kGeometry{8, 128, 128, 0};
constexpr uint32_t kGroup = 4;
constexpr uint32_t kHeads = kGeometry.kv_head_count * kGroup;
constexpr uint32_t kMostAgents = 16;

struct Options {
  std::string json;
  std::vector<uint64_t> tokens = {8192, 32768, 131072};
  std::vector<std::string> profiles = {"k8v8", "k6v5", "k5v4", "k8v3", "k4v3"};
  uint32_t rounds = 15;
  uint64_t mib = 512;
};

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "gpu_bench: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void check(const Status& status) {
  if (status.is_ok()) return;
  std::fprintf(stderr, "gpu_bench: %s\n", status.message().c_str());
  std::exit(1);
}
struct WrongResult : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void verify(bool is_right, const char* what, double error) {
  if (!is_right) throw WrongResult(format("%s is wrong: relative error %g", what, error));
}

/// Device memory.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, std::max<size_t>(count, 1) * sizeof(T)), "allocate device memory");
    data_ = static_cast<T*>(memory);
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    check(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> values(count_);
    check(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "copy");
    return values;
  }

 private:
  size_t count_;
  T* data_ = nullptr;
};

/// Milliseconds of work that is queued on the default stream: the median of some rounds.
double median_ms(uint32_t rounds, const std::function<void()>& work) {
  cudaEvent_t begin;
  cudaEvent_t end;
  check(cudaEventCreate(&begin), "make an event");
  check(cudaEventCreate(&end), "make an event");
  work();
  work();
  check(cudaDeviceSynchronize(), "warm up");
  std::vector<float> times(rounds);
  for (float& time : times) {
    check(cudaEventRecord(begin), "record an event");
    work();
    check(cudaEventRecord(end), "record an event");
    check(cudaEventSynchronize(end), "run");
    check(cudaEventElapsedTime(&time, begin, end), "read an event");
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return static_cast<double>(times[rounds / 2]);
}

std::vector<uint16_t> random_halves(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(count);
  // As many different ones as matter to a codec, repeated at a distance that is no multiple of a row.
  const size_t period = std::min<size_t>(count, 8'388'593);
  for (size_t i = 0; i < period; ++i) values[i] = f16_from_f32(normal(random));
  for (size_t i = period; i < count; ++i) values[i] = values[i - period];
  return values;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(difference / norm);  // NaN fails every comparison
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "ask for the GPU's properties");
    multiprocessors_ = static_cast<uint32_t>(properties.multiProcessorCount);
    report_["gpu"] = properties.name;
    const size_t bytes = std::max<size_t>(options.mib * 2, 1) << 20;
    const Buffer<uint8_t> from(bytes);
    const Buffer<uint8_t> to(bytes);
    const double ms = median_ms(options.rounds, [&] {
      check(cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice), "copy");
    });
    copy_gb_per_s_ = 2 * static_cast<double>(bytes) / ms / 1e6;
    report_["copy_gb_per_s"] = copy_gb_per_s_;
    std::printf("%s: a copy within the device moves %.0f GB/s, read and written\n", properties.name,
                copy_gb_per_s_);
    std::printf("%-8s %-11s %7s %6s %9s %9s %8s\n", "what", "profile", "tokens", "agents", "ms",
                "GB/s", "of copy");
  }

  void run(Profile profile, uint64_t tokens);

 private:
  void add(const char* what, Profile profile, uint64_t tokens, uint32_t agents, const char* how,
           double ms, uint64_t bytes, size_t layers) {
    const double gb_per_s = static_cast<double>(bytes) / ms / 1e6;
    std::printf("%-8s %-11s %7llu %6u %9.4f %9.0f %8.2f  %s\n", what, profile_name(profile),
                static_cast<unsigned long long>(tokens), agents, ms / static_cast<double>(layers),
                gb_per_s, gb_per_s / copy_gb_per_s_, how);
    report_["rows"].push_back({{"operation", what},
                               {"profile", profile_name(profile)},
                               {"tokens", tokens},
                               {"agents", agents},
                               {"how", how},
                               {"ms_per_layer", ms / static_cast<double>(layers)},
                               {"gb_per_s", gb_per_s},
                               {"copy_fraction", gb_per_s / copy_gb_per_s_}});
    save();
  }
  void save() const {
    if (options_.json.empty()) return;
    std::ofstream file(options_.json);
    file << report_.dump(1) << '\n';
    if (!file.good()) check(Status(POLYKV_ERR_SYSTEM, "write " + options_.json + " failed"));
  }
  std::vector<float> attend_on_cpu(const LayerView& layer, const std::vector<float>& q) const;

  Options options_;
  uint32_t multiprocessors_ = 0;
  double copy_gb_per_s_ = 0;
  nlohmann::json report_;
};

/// q: [head, dim], times the scale.
std::vector<float> Bench::attend_on_cpu(const LayerView& layer, const std::vector<float>& q) const {
  AttendQueries queries;
  queries.head_count = kHeads;
  queries.row_count = 1;
  queries.q = q.data();
  std::vector<float> output(size_t{kHeads} * kGeometry.v_head_dim);
  AttendScratch scratch;
  for (uint32_t kv_head = 0; kv_head < kGeometry.kv_head_count; ++kv_head) {
    std::vector<AttendPart> parts{AttendPart(kGroup, kGeometry.v_head_dim)};
    if (!attend_tokens(*codec_for(layer.profile), layer, kv_head, 0, 0, layer.token_count, queries,
                       parts[0], scratch))
      check(Status(POLYKV_ERR_INTERNAL, "attend on the CPU: a logit is beyond fp32"));
    for (uint32_t row = 0; row < kGroup; ++row) {
      join_parts(parts, row, kGeometry.v_head_dim,
                 &output[(size_t{kv_head} * kGroup + row) * kGeometry.v_head_dim]);
    }
  }
  return output;
}

void Bench::run(Profile profile, uint64_t tokens) {
  // A segment of one layer says where everything is; its payload is in device memory, once for each layer.
  SegmentSpec spec;
  spec.identity.source_dtype = Dtype::f16;
  spec.identity.layers = {kGeometry};
  spec.profile = profile;
  spec.token_count = tokens;
  spec.digest_count = segment_digest_count(0, tokens, true);
  const Result<SegmentLayout> layout = plan_segment(spec);
  check(layout.status());
  std::vector<uint8_t, std::allocator<uint8_t>> storage(layout->header.total_bytes + 64);
  auto* const aligned =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(storage.data()) + 63) / 64 * 64);
  const std::span<uint8_t> bytes(aligned, layout->header.total_bytes);
  const std::vector<uint32_t> ids(tokens);
  const std::vector<Digest> digests(spec.digest_count);
  Result<SegmentWriter> writer = SegmentWriter::create(spec, {ids, {}, digests}, bytes);
  check(writer.status());

  const uint64_t payload_bytes = layout->records[0].payload_bytes;
  const size_t stride = (payload_bytes + 255) / 256 * 256;
  const size_t layers = std::max<size_t>(2, (options_.mib << 20) / stride + 1);
  const Buffer<uint8_t> payloads(stride * layers);
  check(cudaMemset(payloads.get(), 0, stride * layers), "zero");
  const size_t values = tokens * kGeometry.kv_head_count * kGeometry.k_head_dim;
  const Buffer<uint16_t> k(random_halves(values, 1));
  const Buffer<uint16_t> v(random_halves(values, 2));
  const Strides dense{kGeometry.k_head_dim, int64_t{kGeometry.kv_head_count} * kGeometry.k_head_dim,
                      1};
  const KvSource source{Dtype::f16, k.get(), dense, v.get(), dense};

  // Encode. The first four tokens are exact rows: their list is in the payload.
  LayerSlot host_slot{};
  check(writer->fill_layer(0, {}, [&](LayerSlot& slot) {
    host_slot = slot;
    return Status::ok();
  }));
  const std::span<uint8_t> host_payload = writer->layer_payload(0);
  std::vector<LayerSlot> slots;
  for (size_t layer = 0; layer < layers; ++layer) {
    uint8_t* const payload = payloads.get() + layer * stride;
    check(cudaMemcpy(payload, host_payload.data(), payload_bytes, cudaMemcpyHostToDevice), "copy");
    slots.push_back(lib::on_device(host_slot, host_payload.data(), payload));
  }
  const uint64_t encode_bytes = cuda::encode_workspace_bytes(host_slot);
  const Buffer<uint8_t> encode_workspace(encode_bytes);
  const Buffer<cuda::EncodeOutcome> outcome(1);
  const auto encode = [&](size_t layer) {
    check(cuda::encode(source, slots[layer], {encode_workspace.get(), encode_bytes}, outcome.get(),
                       nullptr));
  };
  for (size_t layer = 0; layer < layers; ++layer) encode(layer);
  check(cudaDeviceSynchronize(), "encode");
  const cuda::EncodeOutcome done = outcome.host()[0];
  check(cuda::encode_status(done, profile, Dtype::f16));

  // What the CPU makes of the device's bytes of the last layer.
  check(cudaMemcpy(host_payload.data(), payloads.get() + (layers - 1) * stride, payload_bytes,
                   cudaMemcpyDeviceToHost),
        "copy");
  LayerView host_view{host_slot.geometry,
                      host_slot.source_dtype,
                      host_slot.profile,
                      host_slot.token_count,
                      host_slot.block_bytes,
                      host_slot.block_count,
                      host_slot.exact_row_capacity,
                      host_slot.exact_row_count,
                      done.scales,
                      host_slot.k_means,
                      host_slot.exact_tokens,
                      host_slot.exact_k,
                      host_slot.exact_v,
                      host_slot.blocks};
  std::vector<LayerView> views;
  for (size_t layer = 0; layer < layers; ++layer)
    views.push_back(
        lib::on_device(host_view, host_payload.data(), payloads.get() + layer * stride));

  DecodeTarget cpu_target;
  cpu_target.token_count = tokens;
  std::vector<float> want_k(values);
  std::vector<float> want_v(values);
  cpu_target.k = want_k.data();
  cpu_target.k_strides = dense;
  cpu_target.v = want_v.data();
  cpu_target.v_strides = dense;
  codec_for(profile)->decode(host_view, cpu_target);
  // The encoder: its codes decode to something as close to the source as the profile is.
  const auto as_floats = [](const std::vector<uint16_t>& halves) {
    std::vector<float> floats(halves.size());
    for (size_t i = 0; i < halves.size(); ++i) floats[i] = f32_from_f16(halves[i]);
    return floats;
  };
  const double coding_error = std::max(relative_error(want_k, as_floats(k.host())),
                                       relative_error(want_v, as_floats(v.host())));
  verify(coding_error < 0.25, "encode", coding_error);

  const Buffer<uint16_t> k_out(values);
  const Buffer<uint16_t> v_out(values);
  const DecodeTarget target{0, tokens, Dtype::f16, k_out.get(), dense, v_out.get(), dense};
  const auto decode = [&](size_t layer) { check(cuda::decode(views[layer], target, nullptr)); };
  decode(layers - 1);
  check(cudaDeviceSynchronize(), "decode");
  const double k_error = relative_error(as_floats(k_out.host()), want_k);
  const double v_error = relative_error(as_floats(v_out.host()), want_v);
  verify(k_error < 1e-3 && v_error < 1e-3, "decode", std::max(k_error, v_error));

  const size_t q_values = size_t{kMostAgents} * kHeads * kGeometry.k_head_dim;
  const Buffer<uint16_t> q(random_halves(q_values, 3));
  const Buffer<float> output(q_values);
  cuda::AttendRun run;
  run.token_count = tokens;
  cuda::AttendCall call;
  call.head_count = kHeads;
  call.query_dtype = Dtype::f16;
  call.q = q.get();
  call.q_strides = {int64_t{kHeads} * kGeometry.k_head_dim, kGeometry.k_head_dim, 1};
  call.scale = 1.0F / std::sqrt(static_cast<float>(kGeometry.k_head_dim));
  call.output = output.get();
  call.output_strides = call.q_strides;
  const auto runs_of = [&](size_t layer) {
    run.layer = views[layer];
    call.runs = {&run, 1};
  };
  runs_of(0);
  call.query_count = kMostAgents;
  uint64_t workspace_bytes = 0;
  for (const cuda::Products products : {cuda::Products::scalar, cuda::Products::tensor}) {
    call.products = products;
    workspace_bytes =
        std::max(workspace_bytes, cuda::plan_attend(call, multiprocessors_).workspace_bytes);
  }
  const Buffer<uint8_t> workspace(workspace_bytes);
  const auto attend = [&](size_t layer, uint32_t agents, cuda::Products products) {
    runs_of(layer);
    call.query_count = agents;
    call.products = products;
    check(cuda::attend(call, {workspace.get(), workspace_bytes}, multiprocessors_, nullptr));
  };
  const std::vector<float> q_floats = as_floats(q.host());
  const size_t agent_values = size_t{kHeads} * kGeometry.k_head_dim;
  for (const uint32_t agents : {1U, kMostAgents}) {
    // Of the last agent.
    const auto begin = static_cast<int64_t>((agents - 1) * agent_values);
    const auto end = begin + static_cast<int64_t>(agent_values);
    std::vector<float> scaled(q_floats.begin() + begin, q_floats.begin() + end);
    for (float& value : scaled) value *= call.scale;
    const std::vector<float> want = attend_on_cpu(host_view, scaled);
    for (const cuda::Products products : {cuda::Products::scalar, cuda::Products::tensor}) {
      attend(layers - 1, agents, products);
      check(cudaDeviceSynchronize(), "attend");
      const std::vector<float> outputs = output.host();
      const double error = relative_error({outputs.begin() + begin, outputs.begin() + end}, want);
      verify(error < 5e-3, products == cuda::Products::scalar ? "attend" : "attend by tensor cores",
             error);
    }
  }

  const auto all_layers = [&](const std::function<void(size_t)>& work) {
    return median_ms(options_.rounds, [&] {
      for (size_t layer = 0; layer < layers; ++layer) work(layer);
    });
  };
  std::vector<cuda::ChecksumRange> ranges;
  for (size_t layer = 0; layer < layers; ++layer)
    ranges.push_back({payloads.get() + layer * stride, payload_bytes});
  const Buffer<uint64_t> sums(layers);
  const auto checksum = [&] { check(cuda::checksum(ranges, sums.get(), nullptr)); };
  checksum();
  check(cudaDeviceSynchronize(), "checksum");
  verify(sums.host().back() == XXH3_64bits(host_payload.data(), payload_bytes), "checksum", 1);

  const uint64_t packed = payload_bytes * layers;
  const uint64_t raw = 2 * values * 2 * layers;
  add("decode", profile, tokens, 1, "", all_layers(decode), raw + packed, layers);
  for (const uint32_t agents : {1U, kMostAgents}) {
    const auto attend_all = [&](cuda::Products products) {
      return all_layers([&](size_t layer) { attend(layer, agents, products); });
    };
    add("attend", profile, tokens, agents, "one call", attend_all(cuda::Products::automatic),
        packed, layers);
    add("attend", profile, tokens, agents, "without tensor cores",
        attend_all(cuda::Products::scalar), packed, layers);
  }
  add("checksum", profile, tokens, 1, "all layers at once", median_ms(options_.rounds, checksum),
      packed, layers);
  // Last: it writes over what the others read.
  add("encode", profile, tokens, 1, "", all_layers(encode), raw + packed, layers);
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("speed of the CUDA kernels");
  app.add_option("--json", options.json, "file for the rows");
  app.add_option("--tokens", options.tokens, "of the document")->delimiter(',');
  app.add_option("--profiles", options.profiles, "codec profiles")->delimiter(',');
  app.add_option("--rounds", options.rounds, "of each measurement")->check(CLI::PositiveNumber);
  app.add_option("--mib", options.mib, "packed bytes of all layers");
  CLI11_PARSE(app, argc, argv);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::printf("gpu_bench: unavailable: no GPU that CUDA can use: %s\n",
                error == cudaSuccess ? "none found" : cudaGetErrorString(error));
    return 77;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a pipe gets each row at once, whatever ends the run
  int exit_code = 0;
  Bench bench(options);
  for (const uint64_t tokens : options.tokens) {
    for (const std::string& name : options.profiles) {
      const std::optional<Profile> profile = profile_from_name(name);
      if (!profile) check(Status(POLYKV_ERR_INVALID_ARGUMENT, "no profile is named " + name));
      try {
        bench.run(*profile, tokens);
      } catch (const WrongResult& wrong) {
        std::printf("%s, %llu tokens: %s; nothing of it is timed\n", name.c_str(),
                    static_cast<unsigned long long>(tokens), wrong.what());
        exit_code = 1;
      }
    }
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_bench: %s\n", error.what());
    return 1;
  }
}
