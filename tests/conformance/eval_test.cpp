// polykv_eval on one short window of GPL-3: the profiles in their order, and what the tool says.
// A window this short tells an order, not figures; docs/benchmarks.md has those.
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "daemon/prefill/eval/baselines.h"
#include "daemon/prefill/eval/divergence.h"
#include "tests/support/model.h"
#include "tests/support/run_program.h"

using namespace polykv;
using namespace polykv::test;

namespace {

ProgramRun run_eval(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--model", model_path_or_skip(), "--text", kGpl3Path});
  return run_program(POLYKV_EVAL_PATH, arguments);
}

}  // namespace

TEST_CASE(
    "more bits are closer to the uncompressed cache, and all profiles closer than the paper's") {
  const ProgramRun run =
      run_eval({"--windows", "1", "--context", "512", "--targets", "128", "--json", "--profiles",
                "exact,k8v8,k6v5,k5v4,k8v3,k4v3,paper-k8v3,q5_0"});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  std::map<std::string, nlohmann::json> of;
  const nlohmann::json output = nlohmann::json::parse(run.output);
  for (const auto& profile : output["profiles"]) of[profile["name"]] = profile;
  const auto kld = [&](const char* name) { return of.at(name)["kld_mean"].get<double>(); };
  CHECK(kld("exact") == 0);
  CHECK(kld("k8v8") < kld("k6v5"));
  CHECK(kld("k6v5") < kld("k5v4"));
  CHECK(kld("k5v4") < kld("k4v3"));
  CHECK(kld("k8v8") < kld("k8v3"));
  CHECK(kld("k8v3") < kld("paper-k8v3"));
  CHECK(kld("k4v3") < kld("paper-k8v3"));
  CHECK(3 * kld("k5v4") < kld("paper-k8v3"));
  CHECK(2 * kld("k5v4") < kld("q5_0"));
  CHECK(kld("k8v8") < 2e-4);
  CHECK(of.at("k8v8")["top1"] >= 0.98);
  for (const char* field :
       {"bits_per_value", "kld_median", "kld_p999", "ppl_change_percent", "ppl_stderr"}) {
    CHECK(of.at("k5v4")[field].is_number());
  }
  CHECK(of.at("q5_0")["bits_per_value"] == 5.5);
  // Above 4.75 for exact rows (4 first ones and 4 chosen ones of 512 are 0.25), means and headers.
  CHECK(of.at("k5v4")["bits_per_value"] > 5.0);
  CHECK(of.at("k5v4")["bits_per_value"] < 5.1);
  CHECK(of.at("k5v4")["certificate"]["worst"] < of.at("k4v3")["certificate"]["worst"]);
  CHECK(of.at("exact")["certificate"]["worst"] == 0);
  CHECK(!of.at("q5_0").contains("certificate"));
}

TEST_CASE("attending to the packed context costs a model what decoding it costs") {
  const auto kld_of = [](const char* through) {
    const ProgramRun run =
        run_eval({"--windows", "1", "--context", "256", "--targets", "64", "--json", "--through",
                  through, "--profiles", "exact,k8v8,k6v5,k5v4,k8v3,k4v3,paper-k8v3"});
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    std::map<std::string, double> kld;
    const nlohmann::json output = nlohmann::json::parse(run.output);
    for (const auto& profile : output["profiles"]) kld[profile["name"]] = profile["kld_mean"];
    return kld;
  };
  const auto attended = kld_of("attend");
  const auto decoded = kld_of("decode");
  for (const auto& [profile, kld] : attended) {
    INFO(profile);
    CHECK(kld == Approx(decoded.at(profile)).epsilon(0.03).margin(1e-7));
  }
  const ProgramRun baseline = run_eval({"--through", "attend", "--profiles", "q8_0"});
  CHECK(baseline.exit_code == POLYKV_ERR_UNSUPPORTED);
  CHECK(baseline.errors.find("q8_0 has no packed form") != std::string::npos);
}

TEST_CASE("with hostile keys auto stays close where the cheapest profile is far off") {
  const ProgramRun run = run_eval({"--windows", "1", "--context", "512", "--targets", "64",
                                   "--json", "--hostile", "300", "--profiles", "k4v3,auto"});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  const nlohmann::json profiles = nlohmann::json::parse(run.output)["profiles"];
  const nlohmann::json& plain = profiles[0];
  const nlohmann::json& chosen = profiles[1];
  CHECK(chosen["kld_mean"] <= 0.01);
  CHECK(plain["kld_mean"] >= 0.1);
  CHECK(chosen["stored_bytes"] > plain["stored_bytes"]);
  CHECK(chosen["certificate"]["worst"] <= 0.1);
  CHECK(plain["certificate"]["worst"] > 0.1);
  CHECK(chosen["certificate"]["layers"].size() == 30);
  CHECK(chosen["layer_profiles"]["exact"] > 0);
  CHECK(chosen["layer_profiles"]["k5v4"] > 0);
}

TEST_CASE("the baselines' arithmetic is the published one") {
  float block[eval::kBaselineBlock];
  float out[eval::kBaselineBlock];
  for (int i = 0; i < 32; ++i) block[i] = static_cast<float>(i - 16);
  // The extreme is -16: steps of 2 from -16 to 14, halves upwards.
  eval::pass_through(*eval::baseline_from_name("q4_0"), block, out, 32);
  CHECK(out[0] == -16);
  CHECK(out[1] == -14);
  CHECK(out[16] == 0);
  CHECK(out[17] == 2);
  CHECK(out[31] == 14);
  eval::pass_through(*eval::baseline_from_name("q5_0"), block, out, 32);
  for (int i = 0; i < 32; ++i) CHECK(out[i] == block[i]);
  // 16 is code 127 of a scale that fp16 rounds.
  eval::pass_through(*eval::baseline_from_name("q8_0"), block, out, 32);
  CHECK(out[0] == Approx(-16).epsilon(5e-4));
  CHECK(out[16] == 0);
  CHECK(out[31] == Approx(15).epsilon(5e-3));
  std::fill_n(block, 32, 0.0F);
  eval::pass_through(*eval::baseline_from_name("q4_0"), block, out, 32);
  CHECK(out[5] == 0);
  CHECK(!eval::baseline_from_name("q3_0").has_value());
}

TEST_CASE("divergence and change of perplexity are those of the distributions") {
  // Two positions, two tokens: (1/2, 1/2) against (3/4, 1/4), and a distribution against itself.
  const float three = std::log(3.0F);
  const std::vector<float> want = {1, 1, 0, three};
  const std::vector<float> got = {three, 0, 5, 5 + three};
  const std::vector<uint32_t> next = {1, 0};
  const auto scores = eval::score_positions(want, got, next, 2);
  REQUIRE(scores.size() == 2);
  CHECK(scores[0].kld == Approx(0.5 * std::log(2.0 / 3) + 0.5 * std::log(2.0)));
  CHECK(scores[0].loss_change == Approx(std::log(2.0)));
  CHECK(scores[0].same_top);  // the first of equals
  CHECK(scores[1].kld == Approx(0).margin(1e-7));
  CHECK(scores[1].loss_change == Approx(0).margin(1e-7));
  const eval::Summary summary = eval::summarise(scores);
  CHECK(summary.kld_mean == Approx(scores[0].kld / 2));
  CHECK(summary.kld_p999 == scores[0].kld);
  CHECK(summary.top1 == 1);
  CHECK(summary.ppl_change_percent == Approx(100 * (std::sqrt(2.0) - 1)).epsilon(1e-6));
  CHECK(summary.ppl_stderr == Approx(100 * std::sqrt(2.0) * std::log(2.0) / 2).epsilon(1e-6));
}

TEST_CASE("what cannot be evaluated is refused, and says why") {
  const ProgramRun unknown = run_eval({"--profiles", "k7v7"});
  CHECK(unknown.exit_code == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(unknown.errors.find("'k7v7' is unknown") != std::string::npos);
  const ProgramRun short_text =
      run_eval({"--windows", "2", "--context", "7600", "--targets", "60"});
  CHECK(short_text.exit_code == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(short_text.errors.find("need more") != std::string::npos);
  const ProgramRun too_long = run_eval({"--context", "8000", "--targets", "500"});
  CHECK(too_long.exit_code == POLYKV_ERR_CONTEXT_EXCEEDED);
}
