// gpu_bench: how fast the kernels encode, decode, attend and make checksums on this GPU, as fractions of a device-to-device copy measured
// in the same run. Each kernel's result is compared with the CPU's before anything of its profile is timed; a wrong one
// is told, nothing of that profile is timed, and the exit code is 1 at the end. No GPU: 77. The JSON is written
// anew after each row.
//
//   gpu_bench [--json FILE] [--tokens 8192,32768,131072] [--segment-tokens 4096] [--profiles k5v4,...] [--rounds N] [--mib N]
//
// Layers of one document, as many as make --mib packed bytes, so that no cache holds them (document.h), and what 1 and 16
// agents ask of it (attention.h).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "common/command_line.h"
#include "libclient/publisher.h"
#include "tests/gpu/gpu_bench/attention.h"

using namespace polykv;
using namespace polykv::bench;

namespace {

struct Options {
  std::string json;
  std::vector<uint64_t> tokens = {8192, 32768, 131072};
  uint64_t segment_tokens = lib::kSegmentTokens;
  std::vector<std::string> profiles = {"k8v8", "k6v5", "k5v4", "k8v3", "k4v3"};
  uint32_t rounds = 15;
  uint64_t mib = 512;
};

class Bench {
 public:
  explicit Bench(const Options& options);
  void run(Profile profile, uint64_t tokens);

 private:
  struct Row {
    const char* operation;
    Profile profile;
    uint64_t tokens;
    uint32_t agents;
    const char* how;
  };
  void add(const Row& row, double ms, uint64_t bytes, size_t layers);
  void save() const;

  Options options_;
  uint32_t multiprocessors_ = 0;
  double copy_gb_per_s_ = 0;
  nlohmann::json report_;
};

Bench::Bench(const Options& options) : options_(options) {
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

void Bench::add(const Row& row, double ms, uint64_t bytes, size_t layers) {
  const double layer_ms = ms / static_cast<double>(layers);
  const double gb_per_s = static_cast<double>(bytes) / ms / 1e6;
  std::printf("%-8s %-11s %7llu %6u %9.4f %9.0f %8.2f  %s\n", row.operation,
              profile_name(row.profile), static_cast<unsigned long long>(row.tokens), row.agents,
              layer_ms, gb_per_s, gb_per_s / copy_gb_per_s_, row.how);
  report_["rows"].push_back({{"operation", row.operation},
                             {"profile", profile_name(row.profile)},
                             {"tokens", row.tokens},
                             {"agents", row.agents},
                             {"how", row.how},
                             {"ms_per_layer", layer_ms},
                             {"gb_per_s", gb_per_s},
                             {"copy_fraction", gb_per_s / copy_gb_per_s_}});
  save();
}

void Bench::save() const {
  if (options_.json.empty()) return;
  std::ofstream file(options_.json);
  file << report_.dump(1) << '\n';
  if (!file.good()) check(Status(POLYKV_ERR_SYSTEM, "write " + options_.json + " failed"));
}

void Bench::run(Profile profile, uint64_t tokens) {
  BenchDocument document(profile, tokens, options_.segment_tokens, options_.mib << 20);
  Attention attention(document, multiprocessors_);
  document.verify_coding();
  document.verify_checksums();
  for (const uint32_t agents : {1U, kMostAgents}) {
    for (const cuda::Products products : {cuda::Products::scalar, cuda::Products::tensor})
      attention.verify_result(agents, products);
  }

  const size_t layers = document.layer_count();
  const auto all_layers = [&](const std::function<void(size_t)>& work) {
    return median_ms(options_.rounds, [&] {
      for (size_t layer = 0; layer < layers; ++layer) work(layer);
    });
  };
  const uint64_t packed = document.packed_bytes();
  const uint64_t both = document.raw_bytes() + packed;
  add({"decode", profile, tokens, 1, ""}, all_layers([&](size_t layer) { document.decode(layer); }),
      both, layers);
  for (const uint32_t agents : {1U, kMostAgents}) {
    const auto attend = [&](cuda::Products products) {
      return all_layers([&](size_t layer) { attention.attend(layer, agents, products); });
    };
    add({"attend", profile, tokens, agents, "one call"}, attend(cuda::Products::automatic), packed,
        layers);
    add({"attend", profile, tokens, agents, "without tensor cores"}, attend(cuda::Products::scalar),
        packed, layers);
  }
  const std::vector<cuda::ChecksumRange> ranges = document.payloads();
  const Buffer<uint64_t> sums(ranges.size());
  add({"checksum", profile, tokens, 1, "all layers at once"},
      median_ms(options_.rounds, [&] { check(cuda::checksum(ranges, sums.get(), nullptr)); }),
      packed, layers);
  // Last: it writes over what the others read.
  add({"encode", profile, tokens, 1, ""}, all_layers([&](size_t layer) { document.encode(layer); }),
      both, layers);
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("speed of the CUDA kernels");
  const CLI::Range counts(1, 1 << 24);
  app.add_option("--json", options.json, "file for the rows");
  app.add_option("--tokens", options.tokens, "of the document")->delimiter(',')->check(counts);
  app.add_option("--segment-tokens", options.segment_tokens, "of a segment, at most")
      ->check(counts);
  app.add_option("--profiles", options.profiles, "codec profiles")
      ->delimiter(',')
      ->check([](const std::string& name) {
        const std::optional<Profile> profile = profile_from_name(name);
        return profile && codec_for(*profile) != nullptr ? ""
                                                         : "no profile of layers is named " + name;
      });
  app.add_option("--rounds", options.rounds, "of each measurement")->check(counts);
  app.add_option("--mib", options.mib, "packed bytes of all layers")->check(CLI::Range(0, 1 << 20));
  if (const auto code = parse_command_line(app, argc, argv)) return *code;
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
      try {
        bench.run(*profile_from_name(name), tokens);
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
