// Every path of this machine against the reference, on random layers of every kind: encoding,
// decoding, and attention in the packed form. POLYKV_CPU chooses the path.
//
//   differential_fuzz SECONDS [SEED [PATH]]   from this seed on, or a random one; 0 SECONDS: one case. PATH: exit code 77
//                                             unless that is the machine's way to attend (avx512)
//
// A failing case prints the seed that repeats it alone.
#include <chrono>
#include <cstdio>
#include <random>
#include <string_view>

#include "kernels/cpu/attend_packed.h"
#include "tests/fuzz/emulated_avx512.h"
#include "tests/support/attention_oracle.h"
#include "tests/support/compare_paths.h"

using namespace polykv;
using namespace polykv::test;

namespace {

/// The way to attend that is tried.
const cpu::AttendOps* ops_for(const LayerView& layer) {
#ifdef POLYKV_EMULATE_AVX512
  const cpu::AttendOps* ops = cpu::emulated_avx512_attend_ops();
  return layer.geometry.v_head_dim % ops->v_dim_multiple == 0 ? ops : nullptr;
#else
  return cpu::packed_ops_for(layer);
#endif
}

bool attend(const LayerView& layer, uint32_t kv_head, uint64_t document_token, uint64_t first,
            uint64_t count, const AttendQueries& queries, AttendPart& part,
            AttendScratch& scratch) {
  if (const cpu::AttendOps* ops = ops_for(layer)) {
    return cpu::attend_packed(*ops, layer, kv_head, document_token, first, count, queries, part,
                              scratch);
  }
  return attend_tokens(*codec_for(layer.profile), layer, kv_head, document_token, first, count,
                       queries, part, scratch);
}

using Engine = std::mt19937_64;

uint32_t pick(Engine& engine, uint32_t low, uint32_t high) {
  return std::uniform_int_distribution<uint32_t>(low, high)(engine);
}
bool chance(Engine& engine, double probability) {
  return std::bernoulli_distribution(probability)(engine);
}

struct Case {
  ProfileRule rule;
  LayerValues values;
  SegmentOptions options;
};

uint32_t random_dim(Engine& engine, const TensorRule& rule) {
  if (!rule.rotated && chance(engine, 0.3)) return 4 * pick(engine, 1, 40);
  constexpr uint32_t kDims[] = {16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512, 528, 1024};
  return kDims[pick(engine, 0, std::size(kDims) - 1)];
}

/// Gaussian with an offset a dim, in a random unit; some rows are zero, tiny, huge or all alike.
void fill(Engine& engine, std::vector<float>& values, uint32_t dim, float offset_scale) {
  std::normal_distribution<float> normal;
  const float unit =
      chance(engine, 0.3) ? std::ldexp(1.0F, static_cast<int>(pick(engine, 0, 120)) - 60) : 1.0F;
  std::vector<float> offsets(dim);
  for (float& offset : offsets) offset = offset_scale * normal(engine);
  for (size_t row = 0; row < values.size() / dim; ++row) {
    float* out = &values[row * dim];
    for (uint32_t i = 0; i < dim; ++i) out[i] = unit * (normal(engine) + offsets[i]);
    if (!chance(engine, 0.05)) continue;
    const uint32_t kind = pick(engine, 0, 4);
    const float constant = out[0];
    for (uint32_t i = 0; i < dim; ++i) {
      if (kind == 0) out[i] = 0;
      if (kind == 1) out[i] *= 0x1p-20F;
      if (kind == 2) out[i] *= 0x1p12F;
      if (kind == 3) out[i] = constant;
      if (kind == 4) out[i] = i == 3 ? 50 * constant : out[i];  // an outlier
    }
  }
}

Case random_case(Engine& engine) {
  Case result;
  result.rule = kProfileRules[pick(engine, 0, std::size(kProfileRules) - 1)];
  const LayerGeometry geometry{pick(engine, 1, 3), random_dim(engine, result.rule.k),
                               random_dim(engine, result.rule.v), 0};
  uint64_t tokens = chance(engine, 0.1) ? pick(engine, 1, 5) : pick(engine, 1, 200);
  if (chance(engine, 0.03)) tokens = pick(engine, 500, 1200);
  result.values = empty_values(geometry, tokens);
  fill(engine, result.values.k, geometry.k_head_dim, chance(engine, 0.5) ? 3 : 0);
  fill(engine, result.values.v, geometry.v_head_dim, 0);
  result.options.first_token = chance(engine, 0.5) ? 0 : pick(engine, 1, 2) * 4096;
  if (tokens > 10 && chance(engine, 0.5)) {
    result.options.chosen_exact_rows = pick(engine, 1, 6);
    uint32_t token = 4;
    for (uint32_t i = 0; i < result.options.chosen_exact_rows && token < tokens; ++i) {
      result.options.chosen.push_back(token);
      token += pick(engine, 1, 90);
    }
  }
  return result;
}

AlignedBytes encode(const Case& c, Backend backend) {
  SegmentOptions options = c.options;
  options.backend = backend;
  const ModelIdentity model = test_model({c.values.geometry});
  return build_segment(test_spec(model, c.rule.profile, c.values.token_count, options), {c.values},
                       options);
}

struct Totals {
  uint64_t cases = 0;
  uint64_t codes = 0;
  uint64_t different_codes = 0;
  uint64_t rows = 0;
  uint64_t excused_rows = 0;
};

const char* compare_encoders(const Case& c, const LayerView& want, const LayerView& got,
                             Totals& totals) {
  const LayerGeometry& geometry = c.values.geometry;
  const size_t mean_bytes = size_t{geometry.kv_head_count} * geometry.k_head_dim * sizeof(float);
  if (std::memcmp(want.k_means, got.k_means, mean_bytes) != 0) return "means differ";
  if (want.scales.k_gain_exponent != got.scales.k_gain_exponent ||
      want.scales.v_gain_exponent != got.scales.v_gain_exponent)
    return "exponents of gains differ";
  const uint64_t rows = c.values.token_count * geometry.kv_head_count;
  for (const TensorPart& part : {k_part(c.rule, geometry), v_part(c.rule, geometry)}) {
    const Differences found = compare(c.values, want, got, part);
    if (found.far != 0) return part.is_k ? "K is encoded otherwise" : "V is encoded otherwise";
    totals.codes += rows * part.head_dim;
    totals.different_codes += found.codes;
    totals.rows += rows;
    totals.excused_rows += found.excused_rows;
  }
  return nullptr;
}

/// Attention of the rows of all heads to [first, first + count).
struct Question {
  uint32_t group;
  uint32_t row_count;
  uint64_t first;
  uint64_t count;
  float soft_cap;
  std::vector<float> q;
  std::vector<uint64_t> first_tokens;
};

Question random_question(Engine& engine, const LayerValues& decoded, uint64_t document_token) {
  const LayerGeometry& geometry = decoded.geometry;
  Question asked{pick(engine, 1, 9), pick(engine, 1, 3), 0, 0, 0, {}, {}};
  asked.first = pick(engine, 0, static_cast<uint32_t>(decoded.token_count - 1));
  if (chance(engine, 0.5)) asked.first = 0;
  asked.count = pick(engine, 1, static_cast<uint32_t>(decoded.token_count - asked.first));
  if (chance(engine, 0.3)) asked.soft_cap = static_cast<float>(pick(engine, 1, 50));
  if (chance(engine, 0.05))
    asked.soft_cap = std::ldexp(1.0F, static_cast<int>(pick(engine, 10, 127)));
  // Logits of a few units, whatever the keys' unit is.
  double largest = 0;
  for (size_t i = 0; i < decoded.k.size(); i += geometry.k_head_dim)
    largest = std::max(largest, norm(&decoded.k[i], geometry.k_head_dim));
  std::normal_distribution<double> normal;
  const double unit = largest == 0 ? 1 : pick(engine, 1, 12) / largest;
  asked.q.resize(size_t{asked.group} * asked.row_count * geometry.kv_head_count *
                 geometry.k_head_dim);
  for (float& value : asked.q) value = static_cast<float>(unit * normal(engine));
  if (chance(engine, 0.3)) {
    const auto tokens = static_cast<uint32_t>(decoded.token_count);
    const uint64_t before = std::min<uint64_t>(document_token, pick(engine, 0, 50));
    for (uint32_t row = 0; row < asked.row_count; ++row)
      asked.first_tokens.push_back(document_token - before + pick(engine, 0, tokens));
  }
  return asked;
}

const char* compare_attention(Engine& engine, const LayerView& layer, const LayerValues& decoded,
                              uint64_t document_token) {
  const LayerGeometry& geometry = decoded.geometry;
  const Question asked = random_question(engine, decoded, document_token);
  AttendQueries queries;
  queries.head_count = asked.group * geometry.kv_head_count;
  queries.row_count = asked.row_count;
  queries.q = asked.q.data();
  queries.soft_cap = asked.soft_cap;
  if (!asked.first_tokens.empty()) queries.first_tokens = asked.first_tokens.data();
  float largest_v = 0;
  for (const float value : decoded.v) largest_v = std::max(largest_v, std::abs(value));
  std::vector<float> output(geometry.v_head_dim);
  std::vector<double> want;
  AttendScratch scratch;
  for (uint32_t head = 0; head < geometry.kv_head_count; ++head) {
    const uint32_t rows = asked.group * asked.row_count;
    std::vector<AttendPart> part(1, AttendPart(rows, geometry.v_head_dim));
    // In one call or two, into one partial result or two.
    const uint64_t cut =
        chance(engine, 0.5) ? asked.count : pick(engine, 0, static_cast<uint32_t>(asked.count));
    if (chance(engine, 0.5)) part.push_back(part[0]);
    if (!attend(layer, head, document_token, asked.first, cut, queries, part.front(), scratch) ||
        !attend(layer, head, document_token, asked.first + cut, asked.count - cut, queries,
                part.back(), scratch))
      return "attention says that a logit is beyond fp32";
    for (uint32_t row = 0; row < rows; ++row) {
      const float* q = &asked.q[(size_t{head} * rows + row) * geometry.k_head_dim];
      uint64_t first = asked.first;
      if (!asked.first_tokens.empty()) {
        const uint64_t from = asked.first_tokens[row % asked.row_count];
        first = std::max(first, from < document_token ? 0 : from - document_token);
      }
      const double want_sum =
          plain_attention(decoded, head, q, first, std::max(first, asked.first + asked.count),
                          asked.soft_cap, want);
      const float sum = join_parts(part, row, geometry.v_head_dim, output.data());
      const double tolerance = logit_tolerance(layer, decoded, head, q);
      if (std::isinf(want_sum) != std::isinf(sum)) return "a row sees other tokens";
      if (!std::isinf(want_sum) && !(std::abs(sum - want_sum) <= tolerance))
        return "log-sum-exp differs";
      // Weights have 15 bits as well.
      const double output_tolerance = (2 * tolerance + 6e-5) * largest_v;
      for (uint32_t i = 0; i < geometry.v_head_dim; ++i) {
        if (!(std::abs(output[i] - want[i]) <= output_tolerance)) return "outputs differ";
      }
    }
  }
  return nullptr;
}

/// Readers must agree on bytes that no encoder writes as well.
void scramble_codes(Engine& engine, const Case& c, const LayerView& layer, AlignedBytes& bytes) {
  const uint64_t start = k_part(c.rule, layer.geometry).codes;
  for (uint32_t head = 0; head < layer.geometry.kv_head_count; ++head) {
    for (uint64_t block = 0; block < layer.block_count; ++block) {
      uint8_t* codes = bytes.span().data() + (layer.block(head, block) - bytes.span().data());
      for (uint64_t i = start; i < layer.block_bytes; ++i)
        codes[i] = static_cast<uint8_t>(engine());
    }
  }
}

/// What is wrong, or null.
const char* run(Engine& engine, Case& c, Totals& totals) {
  c = random_case(engine);
  AlignedBytes want = encode(c, Backend::reference);
  const AlignedBytes got = encode(c, Backend::cpu);
  const SegmentView view = open_segment(want);
  const LayerView layer = view.layer(0);
  if (const char* wrong = compare_encoders(c, layer, open_segment(got).layer(0), totals))
    return wrong;
  if (chance(engine, 0.2)) scramble_codes(engine, c, layer, want);
  const LayerValues decoded = decode_all(view, 0, Backend::reference);
  const LayerValues fast = decode_all(view, 0, Backend::cpu);
  if (!(relative_error(fast.k, decoded.k) <= 1e-6)) return "K is decoded otherwise";
  if (!(relative_error(fast.v, decoded.v) <= 1e-6)) return "V is decoded otherwise";
  for (uint32_t i = 0; i < 3; ++i) {
    if (const char* wrong = compare_attention(engine, layer, decoded, c.options.first_token))
      return wrong;
  }
  ++totals.cases;
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 4) {
    std::fprintf(stderr, "usage: differential_fuzz SECONDS [SEED [PATH]]\n");
    return 2;
  }
  if (argc == 4 && std::string_view(argv[3]) != "avx512") {
    std::fprintf(stderr, "differential_fuzz: there is no path %s; it may be avx512\n", argv[3]);
    return 2;
  }
  const cpu::AttendOps* here = cpu::attend_ops();
  if (argc == 4 && (here == nullptr || std::string_view(here->name) != argv[3])) {
    std::printf("this machine attends by %s, not by %s\n",
                here == nullptr ? "decoding" : here->name, argv[3]);
    return 77;
  }
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(argv[1]));
  const bool once = std::atof(argv[1]) == 0;
  uint64_t seed = argc >= 3 ? std::strtoull(argv[2], nullptr, 0) : std::random_device{}();
  Totals totals;
  do {
    Engine engine(seed);
    Case c;
    if (const char* wrong = run(engine, c, totals)) {
      const LayerGeometry& g = c.values.geometry;
      std::printf("differential_fuzz: seed %llu: %s (%s, %u kv_heads of %u and %u, %llu tokens)\n",
                  static_cast<unsigned long long>(seed), wrong, profile_name(c.rule.profile),
                  g.kv_head_count, g.k_head_dim, g.v_head_dim,
                  static_cast<unsigned long long>(c.values.token_count));
      return 1;
    }
    ++seed;
  } while (!once && std::chrono::steady_clock::now() < end);
  std::printf(
      "%llu cases: %llu of %llu codes a step apart, %llu of %llu rows with two equal scales\n",
      static_cast<unsigned long long>(totals.cases),
      static_cast<unsigned long long>(totals.different_codes),
      static_cast<unsigned long long>(totals.codes),
      static_cast<unsigned long long>(totals.excused_rows),
      static_cast<unsigned long long>(totals.rows));
  const bool codes_are_close =
      static_cast<double>(totals.different_codes) <= 1e-4 * static_cast<double>(totals.codes);
  if (!once && !codes_are_close) std::printf("differential_fuzz: too many codes differ\n");
  return once || codes_are_close ? 0 : 1;
}
