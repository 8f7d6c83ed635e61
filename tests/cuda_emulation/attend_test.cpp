// Attention's kernels against attention in double precision over what the layer decodes to.
#include <catch2/catch.hpp>

#include "kernels/half.h"
#include "tests/cuda_emulation/attend_case.h"
#include "tests/support/compare_paths.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr uint32_t kDims[] = {64, 80, 96, 112, 128, 192, 256};
constexpr uint32_t kGroups[] = {1, 3, 4, 8};
constexpr Schedule kSchedules[] = {{Order::ascending}, {Order::descending}, {Order::random, 5}};

/// K and V of different head_dims; `number` chooses what else there is to choose. No tokens: of a segment that has some.
void attend_both_ways(Profile profile, size_t dim, uint64_t tokens, uint32_t group,
                      uint32_t number) {
  uint32_t v_dim = kDims[(dim * 3 + 2) % std::size(kDims)];
  if (profile == Profile::paper_k8v3) v_dim = std::bit_floor(v_dim);
  const LayerGeometry geometry{2, kDims[dim], v_dim, 0};
  INFO(profile_name(profile) << " " << geometry.k_head_dim << " " << geometry.v_head_dim << ", "
                             << tokens << " tokens, group " << group);
  const Document document(random_values(geometry, std::max<uint64_t>(tokens, 5), number), profile,
                          number % 3 == 0 ? 0 : later_token(profile));
  std::vector<cuda::AttendRun> runs = {document.run()};
  runs[0].token_count = tokens;
  const auto attend = [&](uint32_t queries, cuda::Products products) {
    const std::vector<float> q = random_queries(document.decoded, 2 * group * queries, 8, number);
    Answer answer;
    cuda::AttendCall call = dense_call(runs, group, queries, q, answer);
    call.products = products;
    INFO(queries << " queries, products " << static_cast<int>(products));
    run(call, 1, kSchedules[number % std::size(kSchedules)]);
    check(call, document, answer);
    return answer;
  };
  const Answer scalar = attend(1, cuda::Products::scalar);
  if (profile_rule(profile) == nullptr) return;
  const Answer tensor = attend(1, cuda::Products::tensor);
  // The same integers, but for the rounding of a weight here and there.
  if (tokens > 0) REQUIRE(relative_error(tensor.output, scalar.output) <= 2e-5);
  // More than a tile's rows, where head_dims allow several tiles, of which the last is not full.
  if (number % 2 == 0) attend(22 / group, cuda::Products::tensor);
}

}  // namespace

TEST_CASE("every profile, head_dim and tail attends as double precision does") {
  uint32_t cases = 0;
  for (const Profile profile : kAllProfiles) {
    for (size_t dim = 0; dim < std::size(kDims); ++dim) {
      for (const uint64_t tokens : {0, 1, 63, 64, 65}) {
        if (++cases % POLYKV_CASE_STEP != 0) continue;
        attend_both_ways(profile, dim, tokens, kGroups[cases % std::size(kGroups)], cases);
      }
    }
  }
  CHECK(cases == 7 * 7 * 5);
}

// Hidden, because it takes four times as long: `scripts/test --full`.
TEST_CASE("each of those with every group", "[.full]") {
  uint32_t cases = 0;
  for (const Profile profile : kAllProfiles) {
    for (size_t dim = 0; dim < std::size(kDims); ++dim) {
      for (const uint64_t tokens : {0, 1, 63, 64, 65}) {
        for (const uint32_t group : kGroups) attend_both_ways(profile, dim, tokens, group, ++cases);
      }
    }
  }
  CHECK(cases == 7 * 7 * 5 * 4);
}

TEST_CASE("K and V of any head_dim that a profile holds are attended to as double precision does") {
  uint32_t cases = 0;
  for (const Profile profile : kAllProfiles) {
    for (const uint32_t dim : {16U, 20U, 33U, 48U, 160U, 208U, 240U, 252U, 255U}) {
      for (const LayerGeometry& geometry :
           {LayerGeometry{1, dim, 64, 0}, LayerGeometry{1, 64, dim, 0}}) {
        if (!codec_for(profile)->check_geometry(profile, geometry).is_ok()) continue;
        if (++cases % POLYKV_CASE_STEP != 0) continue;
        INFO(profile_name(profile) << " " << geometry.k_head_dim << " " << geometry.v_head_dim);
        const Document document(random_values(geometry, 70, dim), profile);
        const std::vector<float> q = random_queries(document.decoded, 2, 8, dim);
        const std::vector<cuda::AttendRun> runs = {document.run()};
        Answer answer;
        const cuda::AttendCall call = dense_call(runs, 2, 1, q, answer);
        run(call, 1, kSchedules[cases % std::size(kSchedules)]);
        check(call, document, answer);
      }
    }
  }
}

TEST_CASE("every profile and group gives the same bits in every schedule of threads") {
  struct Shape {
    uint32_t group;
    cuda::Products products;
  };
  constexpr Shape kShapes[] = {{1, cuda::Products::scalar}, {2, cuda::Products::scalar},
                               {4, cuda::Products::scalar}, {5, cuda::Products::scalar},
                               {9, cuda::Products::scalar}, {3, cuda::Products::tensor},
                               {8, cuda::Products::tensor}, {17, cuda::Products::tensor}};
  uint32_t cases = 0;
  for (const Profile profile : kAllProfiles) {
    for (const auto& [group, products] : kShapes) {
      if (++cases % POLYKV_CASE_STEP != 0) continue;
      const uint32_t v_dim = profile == Profile::paper_k8v3 ? 64 : 80;
      const Document document(random_values({2, 64, v_dim, 0}, 150, group), profile, 0,
                              {7, 70, 149});
      const std::vector<float> q = random_queries(document.decoded, 2 * group, 8, group);
      const std::vector<cuda::AttendRun> runs = {document.run()};
      INFO(profile_name(profile) << " group " << group);
      Answer first;
      for (const Schedule& schedule : kSchedules) {
        Answer answer;
        cuda::AttendCall call = dense_call(runs, group, 1, q, answer);
        call.products = products;
        run(call, 1, schedule);
        check(call, document, answer);
        if (first.output.empty()) first = answer;
        CHECK(answer.output == first.output);
        CHECK(answer.log_sum_exp == first.log_sum_exp);
      }
    }
  }
}

TEST_CASE("splits, windows, soft-caps and ranges inside a segment attend as they should") {
  uint32_t cases = 0;
  for (const Profile profile : kAllProfiles) {
    const uint64_t start = later_token(profile);
    const Document document(random_values({2, 80, 64, 0}, 1100, 3), profile, start,
                            {0, 63, 64, 700, 701, 1099});
    for (const bool is_tensor : {false, true}) {
      struct Range {
        uint64_t first, count;
      };
      // The last one: a split's worth of tokens, and a block more than that has.
      for (const Range range : {Range{0, 1100}, {63, 2}, {700, 1}, {700, 301}, {63, 451}}) {
        if (++cases % POLYKV_CASE_STEP != 0) continue;
        const uint32_t multiprocessors = cases / 5 % 3 == 0 ? 132 : 1;
        const std::vector<float> q = random_queries(document.decoded, 2 * 2 * 3, 6, cases);
        std::vector<cuda::AttendRun> runs = {document.run()};
        runs[0].first_token = range.first;
        runs[0].token_count = range.count;
        // The second query sees a few tokens, the third none at all or some.
        const std::vector<uint64_t> first_tokens = {cases % 2 == 0 ? 17 : start + range.first,
                                                    start + range.first + range.count / 2 + 1,
                                                    cases % 2 == 0 ? 100000U : start + 701U};
        Answer answer;
        cuda::AttendCall call = dense_call(runs, 2, 3, q, answer);
        if (cases % 3 != 0) call.query_first_tokens = first_tokens.data();
        if (cases % 2 == 0) call.soft_cap = 2.5F;
        call.products = is_tensor ? cuda::Products::tensor : cuda::Products::scalar;
        INFO(profile_name(profile) << " " << range.first << " + " << range.count << ", "
                                   << multiprocessors << " multiprocessors");
        run(call, multiprocessors, kSchedules[cases % std::size(kSchedules)]);
        check(call, document, answer);
      }
    }
  }
}

TEST_CASE("several segments in one call are attended to as one document") {
  std::vector<std::vector<Profile>> choices;
  for (const Profile profile : kAllProfiles) {
    if (profile != Profile::paper_k8v3) choices.push_back({profile});
  }
  // As `auto` chooses: of each kind of output, and only of those that are not turned.
  choices.push_back(
      {Profile::exact, Profile::k8v8, Profile::k6v5, Profile::k5v4, Profile::k8v3, Profile::k4v3});
  choices.push_back({Profile::k4v3, Profile::k8v8, Profile::k4v3});
  for (const std::vector<Profile>& profiles : choices) {
    // Sanitized, the mixed ones, which have all profiles.
    if (POLYKV_CASE_STEP > 1 && profiles.size() == 1) continue;
    // More than fit into one launch's arguments, some without exact rows, one without tokens.
    const LayerValues whole = random_values({1, 64, 64, 0}, 70 * 70, 9);
    std::vector<Document> documents;
    std::vector<cuda::AttendRun> runs;
    LayerValues decoded = empty_values(whole.geometry, whole.token_count);
    documents.reserve(70);
    for (uint64_t i = 0; i < 70; ++i) {
      LayerValues values = empty_values(whole.geometry, 70);
      std::copy_n(whole.k.begin() + static_cast<int64_t>(i * 70 * 64), 70 * 64, values.k.begin());
      std::copy_n(whole.v.begin() + static_cast<int64_t>(i * 70 * 64), 70 * 64, values.v.begin());
      std::vector<uint32_t> chosen;
      if (i % 3 == 1) chosen = {static_cast<uint32_t>(i % 70)};
      documents.emplace_back(values, profiles[i % profiles.size()], i * 70, chosen);
      const LayerValues& back = documents.back().decoded;
      std::copy(back.k.begin(), back.k.end(),
                decoded.k.begin() + static_cast<int64_t>(i * 70 * 64));
      std::copy(back.v.begin(), back.v.end(),
                decoded.v.begin() + static_cast<int64_t>(i * 70 * 64));
      runs.push_back(documents.back().run());
    }
    const std::vector<float> q = random_queries(decoded, 2 * 2, 6, 1);
    const std::vector<uint64_t> first_tokens = {0, 3333};
    Answer answer;
    cuda::AttendCall call = dense_call(runs, 2, 2, q, answer);
    call.query_first_tokens = first_tokens.data();
    run(call, 8, kSchedules[2]);
    for (uint32_t query = 0; query < 2; ++query) {
      for (uint32_t head = 0; head < 2; ++head) {
        std::vector<double> want;
        const double want_sum = plain_attention(decoded, 0, &q[(head * 2 + query) * 64],
                                                first_tokens[query], 70 * 70, 0, want);
        INFO(profiles.size() << " profiles, " << profile_name(profiles[0]) << " query " << query
                             << " head " << head);
        CHECK(std::abs(answer.log_sum_exp[query * 2 + head] - want_sum) <= 4e-4);
        double worst = 0;
        for (uint32_t i = 0; i < 64; ++i) {
          const double difference = std::abs(answer.output[(query * 2 + head) * 64 + i] - want[i]);
          worst = difference <= worst ? worst : difference;  // NaN is worst
        }
        CHECK(worst <= 1e-3);
      }
    }
  }
}

TEST_CASE("a token that draws nearly everything leaves the others their small weights") {
  // 2,000 tokens of weight e^-9 beside one: together a fifth of it. Fixed point relative to the one would lose them.
  LayerValues values = empty_values({1, 64, 64, 0}, 2001);
  for (size_t i = 0; i < values.k.size(); ++i) {
    values.k[i] = (i / 64 == 1000 && i % 64 == 0 ? 9.0F : 0.0F) + 0.01F * static_cast<float>(i % 7);
    values.v[i] = i / 64 == 1000 ? 0.0F : 1.0F + 0.125F * static_cast<float>(i % 5);
  }
  for (const Profile profile : kAllProfiles) {
    const Document document(values, profile, later_token(profile), {});
    std::vector<float> q(64, 0.0F);
    q[0] = 1;
    const std::vector<cuda::AttendRun> runs = {document.run()};
    Answer answer;
    const cuda::AttendCall call = dense_call(runs, 1, 1, q, answer);
    run(call, 1, kSchedules[0]);
    INFO(profile_name(profile));
    check(call, document, answer);
    // paper-k8v3 has one scale for all keys: 9 is there, and the others are not told apart.
    if (profile != Profile::paper_k8v3) CHECK(answer.output[0] > 0.1);
  }
}

TEST_CASE("queries and outputs of any dtype and strides, with a scale, and no log-sum-exp") {
  const Document document(random_values({2, 64, 80, 0}, 130, 5), Profile::k5v4);
  const std::vector<cuda::AttendRun> runs = {document.run()};
  std::vector<float> q = random_queries(document.decoded, 2 * 3 * 2, 8, 5);
  for (float& value : q) value = f32_from_bf16(bf16_from_f32(value));
  Answer want;
  const cuda::AttendCall plain = dense_call(runs, 3, 2, q, want);
  run(plain, 1, kSchedules[0]);
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    // Queries four times as large as they are to be, [dim, head, query]; outputs with gaps.
    std::vector<float> q32(q.size());
    std::vector<uint16_t> q16(q.size());
    for (uint32_t head = 0; head < 6; ++head) {
      for (uint32_t query = 0; query < 2; ++query) {
        for (uint32_t dim = 0; dim < 64; ++dim) {
          const float value = 4 * q[(head * 2 + query) * 64 + dim];
          const size_t at = (dim * 6 + head) * 2 + query;
          q32[at] = value;
          q16[at] = bf16_from_f32(value);
        }
      }
    }
    std::vector<float> out32(12 * 100, -99.0F);
    std::vector<uint16_t> out16(12 * 100, 0xeeee);
    cuda::AttendCall call = plain;
    call.query_dtype = dtype == Dtype::bf16 ? Dtype::bf16 : Dtype::f32;
    call.q = dtype == Dtype::bf16 ? static_cast<const void*>(q16.data()) : q32.data();
    call.q_strides = {1, 2, 12};
    call.scale = 0.25F;
    call.output_dtype = dtype;
    call.output = dtype == Dtype::f32 ? static_cast<void*>(out32.data()) : out16.data();
    call.output_strides = {100, 200, 1};
    call.log_sum_exp = nullptr;
    run(call, 1, kSchedules[1]);
    uint32_t wrong = 0;
    for (uint32_t head = 0; head < 6; ++head) {
      for (uint32_t query = 0; query < 2; ++query) {
        for (uint32_t dim = 0; dim < 100; ++dim) {
          const size_t at = query * 100 + head * 200 + dim;
          const float value = dim < 80 ? want.output[(query * 6 + head) * 80 + dim] : -99.0F;
          if (dtype == Dtype::f32) {
            wrong += out32[at] != value ? 1U : 0U;
          } else if (dim >= 80) {
            wrong += out16[at] != 0xeeee ? 1U : 0U;
          } else {
            wrong +=
                out16[at] != (dtype == Dtype::f16 ? f16_from_f32(value) : bf16_from_f32(value));
          }
        }
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("a logit that is no finite number makes its row's result NaN, and no other's") {
  const LayerValues values = random_values({1, 64, 64, 0}, 200, 5);
  for (const Profile profile : kAllProfiles) {
    Document document(values, profile);
    std::vector<float> q = random_queries(document.decoded, 2, 8, 5);
    std::fill_n(q.begin(), 64, 3e38F);
    const std::vector<cuda::AttendRun> runs = {document.run()};
    Answer answer;
    const cuda::AttendCall call = dense_call(runs, 2, 1, q, answer);
    run(call, 1, kSchedules[0]);
    INFO(profile_name(profile));
    CHECK(std::isnan(answer.log_sum_exp[0]));
    CHECK(std::isnan(answer.output[3]));
    CHECK(std::isfinite(answer.log_sum_exp[1]));
    CHECK(std::isfinite(answer.output[64 + 3]));
    if (profile_rule(profile) == nullptr) continue;
    // A gain of K, or of V, that no encoder writes: rows that do not see its token, 69, are as they were.
    const std::vector<float> more = random_queries(document.decoded, 4, 8, 5);
    const std::vector<uint64_t> first_tokens = {0, 70};
    for (const cuda::Products products : {cuda::Products::scalar, cuda::Products::tensor}) {
      const auto attend = [&] {
        Answer got;
        cuda::AttendCall both = dense_call(runs, 2, 2, more, got);
        both.query_first_tokens = first_tokens.data();
        both.products = products;
        run(both, 1, kSchedules[0]);
        return got;
      };
      const Answer good = attend();
      for (const uint64_t gains : {QuantizedBlock::k_gains, QuantizedBlock::v_gains}) {
        uint8_t& byte = document.bytes.span()[static_cast<uint64_t>(
            document.layer().block(0, 1) - document.bytes.span().data() +
            static_cast<int64_t>(gains) + 2 * 5 + 1)];
        const uint8_t before = byte;
        byte = 0xfc;
        const Answer bad = attend();
        byte = before;
        for (uint32_t head = 0; head < 2; ++head) {
          CHECK(std::isnan(bad.log_sum_exp[head]));
          CHECK(std::isnan(bad.output[head * 64 + 3]));
          CHECK(bad.log_sum_exp[2 + head] == good.log_sum_exp[2 + head]);
          CHECK(std::abs(bad.output[(2 + head) * 64 + 3] - good.output[(2 + head) * 64 + 3]) <
                1e-4);
        }
      }
    }
  }
}

TEST_CASE("attention on the device refuses what it cannot do, and says why") {
  const Document document(random_values({2, 64, 64, 0}, 70, 1), Profile::k5v4);
  const Document other(random_values({2, 64, 80, 0}, 70, 1), Profile::k5v4);
  const Document paper(random_values({2, 64, 64, 0}, 70, 1), Profile::paper_k8v3);
  const std::vector<float> q(4 * 64, 0.1F);
  Answer answer;
  const auto refused = [&](auto change, polykv_status code, const char* word) {
    std::vector<cuda::AttendRun> runs = {document.run()};
    cuda::AttendCall call = dense_call(runs, 2, 1, q, answer);
    change(call, runs);
    call.runs = runs;
    const Status status = device_attend(call, 1, kSchedules[0]);
    INFO(status.message());
    CHECK(status.code() == code);
    CHECK(status.message().find(word) != std::string::npos);
    CHECK(answer.output == std::vector<float>(4 * 64, -99.0F));
  };
  using Runs = std::vector<cuda::AttendRun>;
  using Call = cuda::AttendCall;
  refused([](Call&, Runs& runs) { runs.clear(); }, POLYKV_ERR_INVALID_ARGUMENT, "no segment");
  refused([](Call&, Runs& runs) { runs[0].first_token = 1; }, POLYKV_ERR_INVALID_ARGUMENT,
          "1 + 70");
  refused([&](Call&, Runs& runs) { runs.push_back(other.run()); }, POLYKV_ERR_INVALID_ARGUMENT,
          "geometry");
  refused([&](Call&, Runs& runs) { runs.push_back(paper.run()); }, POLYKV_ERR_INVALID_ARGUMENT,
          "paper-k8v3");
  refused([&](Call&, Runs& runs) { runs.insert(runs.begin(), paper.run()); },
          POLYKV_ERR_INVALID_ARGUMENT, "paper-k8v3");
  refused([](Call&, Runs& runs) { runs[0].layer.geometry.k_head_dim = 272; },
          POLYKV_ERR_UNSUPPORTED, "272");
  refused([](Call& call, Runs&) { call.head_count = 3; }, POLYKV_ERR_INVALID_ARGUMENT, "kv_heads");
  refused([](Call& call, Runs&) { call.query_count = 0; }, POLYKV_ERR_INVALID_ARGUMENT,
          "0 queries");
  refused([](Call& call, Runs&) { call.q = nullptr; }, POLYKV_ERR_INVALID_ARGUMENT, "null");
  refused([](Call& call, Runs&) { call.soft_cap = -1; }, POLYKV_ERR_INVALID_ARGUMENT, "soft_cap");
  refused([](Call& call, Runs&) { call.output_dtype = static_cast<Dtype>(9); },
          POLYKV_ERR_INVALID_ARGUMENT, "dtype 9");
  // Staging would align them: what is checked is the caller's pointers.
  std::vector<cuda::AttendRun> runs = {document.run()};
  for (int which = 0; which < 3; ++which) {
    cuda::AttendCall call = dense_call(runs, 2, 1, q, answer);
    REQUIRE_OK(cuda::check_attend(call));
    const auto shift = [](auto* pointer) {
      return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + 2);
    };
    if (which == 0) call.q = shift(call.q);
    if (which == 1) call.output = shift(call.output);
    if (which == 2) call.log_sum_exp = shift(call.log_sum_exp);
    CHECK(cuda::check_attend(call).message().find("aligned") != std::string::npos);
  }
}

TEST_CASE("a workspace that is enough for a document is enough for each part of it") {
  for (const uint32_t queries : {1U, 2U, 9U, 256U}) {
    uint64_t largest = 0;
    for (uint64_t tokens = 1; tokens < 140'000; tokens += 211) {
      // Segments as publishers make them.
      std::vector<cuda::AttendRun> runs;
      for (uint64_t first = 0; first < tokens; first += 4096) {
        cuda::AttendRun run;
        run.layer.geometry = {8, 128, 128, 0};
        run.layer.profile = Profile::k5v4;
        run.layer.exact_row_count = first == 0 ? 4 : 0;
        run.document_token = first;
        run.token_count = std::min<uint64_t>(4096, tokens - first);
        run.layer.token_count = run.token_count;
        runs.push_back(run);
      }
      cuda::AttendCall call;
      call.runs = runs;
      call.query_count = queries;
      call.head_count = 32;
      const uint64_t bytes = cuda::plan_attend(call, 132).workspace_bytes;
      REQUIRE(bytes >= largest);
      largest = bytes;
    }
  }
}
