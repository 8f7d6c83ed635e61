#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <new>

#include "kernels/half.h"
#include "tests/bench/polykv_bench/bandwidth.h"
#include "tests/bench/polykv_bench/commands.h"
#include "tests/bench/polykv_bench/measure.h"
#include "tests/bench/polykv_bench/pool.h"
#include "tests/bench/polykv_bench/verify.h"

namespace polykv::bench {

namespace {

struct DtypeRow {
  const char* name;
  polykv_dtype dtype;
  size_t bytes;
  double most_error;  // what rounding to it does, and the arithmetic
};
constexpr DtypeRow kDtypes[] = {
    {"f32", POLYKV_F32, 4, 1e-5}, {"f16", POLYKV_F16, 2, 1e-3}, {"bf16", POLYKV_BF16, 2, 5e-3}};

const DtypeRow& dtype_row(const std::string& name) {
  for (const DtypeRow& row : kDtypes) {
    if (name == row.name) return row;
  }
  throw std::runtime_error("there is no dtype " + name + "; use f16, bf16 or f32");
}

/// An agent's cache: K and V of all layers, K and then V of a layer.
class Cache {
 public:
  Cache(const Shape& shape, const DtypeRow& dtype, bool head_major)
      : shape_(shape),
        dtype_(dtype),
        head_major_(head_major),
        tensor_bytes_(shape.tokens * shape.kv_heads * shape.head_dim * dtype.bytes),
        size_bytes_(tensor_bytes_ * 2 * shape.layers),
        memory_(::mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                       -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Cache() { ::munmap(memory_, size_bytes_); }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  /// Gives the memory's pages back: the next write meets fresh ones.
  void forget_pages() { ::madvise(memory_, size_bytes_, MADV_DONTNEED); }
  /// The next fresh ones are huge where the machine has some.
  void ask_for_huge_pages() { ::madvise(memory_, size_bytes_, MADV_HUGEPAGE); }
  size_t size_bytes() const { return size_bytes_; }

  /// Tokens [first, first + count) to the start of a layer's tensors.
  void decode(const client::Lease& lease, uint32_t layer, uint64_t first, uint64_t count) {
    client::DecodeOptions options;
    options.first_token = first;
    options.token_count = count;
    options.dtype = dtype_.dtype;
    options.k = tensor(layer, false);
    options.v = tensor(layer, true);
    if (head_major_) {
      const auto dim = static_cast<int64_t>(shape_.head_dim);
      options.k_strides = {static_cast<int64_t>(shape_.tokens) * dim, dim, 1};
      options.v_strides = options.k_strides;
    }
    lease.decode(layer, options).value_or_throw();
  }
  /// Of its first `count` tokens, dense [token, kv_head, dim].
  std::vector<float> values(uint32_t layer, bool is_v, uint64_t count) {
    std::vector<float> values;
    for (uint64_t token = 0; token < count; ++token) {
      for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
        const uint64_t row =
            head_major_ ? head * shape_.tokens + token : token * shape_.kv_heads + head;
        for (uint32_t dim = 0; dim < shape_.head_dim; ++dim)
          values.push_back(value(tensor(layer, is_v), row * shape_.head_dim + dim));
      }
    }
    return values;
  }

 private:
  uint8_t* tensor(uint32_t layer, bool is_v) {
    return static_cast<uint8_t*>(memory_) + (size_t{layer} * 2 + (is_v ? 1 : 0)) * tensor_bytes_;
  }
  float value(const void* tensor, size_t index) const {
    if (dtype_.dtype == POLYKV_F32) return static_cast<const float*>(tensor)[index];
    const uint16_t bits = static_cast<const uint16_t*>(tensor)[index];
    return dtype_.dtype == POLYKV_F16 ? f32_from_f16(bits) : f32_from_bf16(bits);
  }

  Shape shape_;
  DtypeRow dtype_;
  bool head_major_;
  size_t tensor_bytes_;
  size_t size_bytes_;
  void* memory_;
};

double error_of(const client::Lease& lease, const Shape& shape, Cache& cache, bool spoils) {
  double error = 0;
  for (const Sample& sample : samples_of(shape)) {
    cache.decode(lease, sample.layer, sample.first, sample.count);
    const DecodedRange want =
        reference_decode(lease, shape, sample.layer, sample.first, sample.count);
    std::vector<float> k = cache.values(sample.layer, false, sample.count);
    if (spoils) k[0] = 1e4F;
    error = std::max({error, relative_error(k, want.k),
                      relative_error(cache.values(sample.layer, true, sample.count), want.v)});
  }
  return error;
}

struct Case {
  Shape shape;
  const DtypeRow& dtype;
  uint32_t threads;
};

/// What the target's pages are when a round begins. The last one changes the cache for good.
enum class Pages { touched, fresh, fresh_huge };
constexpr const char* kPagesNames[] = {"touched", "fresh", "fresh huge"};

Json measure(const client::Lease& lease, const Case& of, Cache& cache, const Options& options,
             const Memory& memory, Pages pages) {
  const auto whole = [&] {
    on_threads(of.threads, [&](uint32_t thread) {
      for (uint32_t layer = thread; layer < of.shape.layers; layer += of.threads)
        cache.decode(lease, layer, 0, of.shape.tokens);
    });
  };
  if (pages == Pages::fresh_huge) cache.ask_for_huge_pages();
  whole();
  Rounds rounds;
  for (uint32_t i = 0; i < options.rounds; ++i) {
    rounds.read.push_back(memory.read());
    rounds.write.push_back(std::max(memory.copy(), memory.fill()));
    if (pages != Pages::touched) cache.forget_pages();
    rounds.seconds.push_back(seconds_of(of.threads, whole));
  }
  Json row = make_row("decode", of.shape, of.threads, rounds);
  row["dtype"] = of.dtype.name;
  row["layout"] = options.head_major ? "head" : "token";
  row["memory"] = kPagesNames[static_cast<size_t>(pages)];
  const auto bytes = static_cast<double>(cache.size_bytes());
  row["written_gb_per_s"] = bytes / row["median_ms"].get<double>() / 1e6;
  row["write_bandwidth_fraction"] = rounds.median_with(
      rounds.write, [&](double seconds, double rate) { return bytes / seconds / rate; });
  return row;
}

void add_rows(const client::Lease& lease, const Case& of, const Options& options,
              const Memory& memory, const Peers& peers, Report& report) {
  Cache cache(of.shape, of.dtype, options.head_major);
  const double error = error_of(lease, of.shape, cache, options.spoils);
  require_close(std::string("decoding ") + profile_name(of.shape.profile), error,
                of.dtype.most_error);
  for (const Pages pages : {Pages::touched, Pages::fresh, Pages::fresh_huge}) {
    Json row = measure(lease, of, cache, options, memory, pages);
    row["error"] = error;
    const double seconds = row["median_ms"].get<double>() / 1e3;
    for (const char* program : {"llama.cpp", "polykv-llm"}) {
      const auto peer_s = peers.restore_s(program, of.shape);
      if (peer_s) row[std::string("vs_") + program] = *peer_s / seconds;
    }
    report.add(std::move(row));
  }
}

/// "always [madvise] never": without it, "fresh huge" is memory of small pages.
std::string huge_page_setting() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  std::getline(file, line);
  return line.empty() ? "none" : line;
}

}  // namespace

void bench_decode(const Options& options, Report& report) {
  report.set("transparent_huge_pages", huge_page_setting());
  report.set_columns({"codec", "head_dim", "tokens", "layers", "threads", "path", "dtype", "layout",
                      "memory", "error", "median_ms", "least_ms", "most_ms", "ns_per_token_kv_head",
                      "written_gb_per_s", "write_bandwidth_fraction", "vs_llama.cpp",
                      "vs_polykv-llm"});
  const Peers peers(options.peers_path);
  for (const uint32_t head_dim : options.head_dims) {
    for (const std::string& codec : options.codecs) {
      const Shape shape = shape_of(options, profile_from_name(codec).value(), head_dim);
      Pool pool(budget_for(shape));
      const client::Lease lease = pool.publish(shape, codec);
      for (const uint32_t threads : options.threads) {
        const Memory memory(threads, options.memory_bytes());
        for (const std::string& dtype : options.dtypes)
          add_rows(lease, {shape, dtype_row(dtype), threads}, options, memory, peers, report);
      }
    }
  }
}

}  // namespace polykv::bench
