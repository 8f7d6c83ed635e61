// polykv_eval --model GGUF --text FILE: what each codec profile costs a model on a text, by the
// Kullback-Leibler divergence of its next-token distributions from those of the uncompressed cache.
// q8_0, q5_0 and q4_0, llama.cpp's cache formats, are there for comparison.
//
// Exit codes: 0, or the number of the status that ended it (docs/exit-codes.md).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "common/command_line.h"
#include "common/fd.h"
#include "common/files.h"
#include "daemon/prefill/eval/protocol.h"
#include "daemon/prefill/model/model.h"
#include "daemon/prefill/model/tokenizer.h"

namespace polykv::eval {

namespace {

struct Arguments {
  std::string model;
  std::string text;
  Protocol protocol;
  std::vector<std::string> profiles = all_method_names();
  uint32_t thread_count = std::max(1U, std::thread::hardware_concurrency());
  bool json = false;
};

Result<std::vector<Method>> methods_of(const Arguments& arguments) {
  std::vector<Method> methods;
  for (const std::string& name : arguments.profiles) {
    POLYKV_ASSIGN_OR_RETURN(Method method, method_from_name(name));
    methods.push_back(std::move(method));
  }
  return methods;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

/// "25 k5v4, 5 k8v8": of a layer of every window.
std::string layers_of(const MethodResult& result) {
  std::string text;
  for (const auto& [profile, count] : result.layer_counts)
    text += format("%s%u %s", text.empty() ? "" : ", ", count, profile_name(profile));
  return text;
}

void print_table(const std::vector<MethodResult>& results) {
  std::printf("uncompressed perplexity %.3f\n", results.front().summary.ppl_exact);
  std::printf("%-11s %11s %11s %11s %11s %11s %8s %20s %19s\n", "profile", "bytes", "bits/value",
              "KLD mean", "median", "99.9 %", "top-1", "PPL change", "certificate (worst)");
  for (const MethodResult& result : results) {
    const Summary& s = result.summary;
    std::printf("%-11s %11.0f %11.3f %11.6f %11.6f %11.4f %6.1f %% %+9.3f +- %.3f %%",
                result.method.name.c_str(), result.stored_bytes, result.bits_per_value, s.kld_mean,
                s.kld_median, s.kld_p999, 100 * s.top1, s.ppl_change_percent, s.ppl_stderr);
    if (!result.certificate.empty())
      std::printf(" %9.4f (%.4f)", mean(result.certificate), result.certificate_worst);
    if (result.method.profile == Profile::automatic)
      std::printf("  layers: %s", layers_of(result).c_str());
    std::printf("\n");
  }
}

void print_json(const std::vector<MethodResult>& results, uint64_t context_values) {
  auto profiles = nlohmann::ordered_json::array();
  for (const MethodResult& result : results) {
    const Summary& s = result.summary;
    profiles.push_back({{"name", result.method.name},
                        {"stored_bytes", result.stored_bytes},
                        {"bits_per_value", result.bits_per_value},
                        {"kld_mean", s.kld_mean},
                        {"kld_median", s.kld_median},
                        {"kld_p999", s.kld_p999},
                        {"top1", s.top1},
                        {"ppl_change_percent", s.ppl_change_percent},
                        {"ppl_stderr", s.ppl_stderr},
                        {"ppl_exact", s.ppl_exact}});
    if (result.certificate.empty()) continue;
    auto layers = nlohmann::ordered_json::object();
    for (const auto& [profile, count] : result.layer_counts) layers[profile_name(profile)] = count;
    profiles.back()["certificate"] = {{"mean", mean(result.certificate)},
                                      {"worst", result.certificate_worst},
                                      {"layers", result.certificate}};
    profiles.back()["layer_profiles"] = layers;
  }
  const nlohmann::ordered_json report = {{"context_values", context_values},
                                         {"profiles", profiles}};
  std::printf("%s\n", report.dump(2).c_str());
}

Status run(const Arguments& arguments) {
  POLYKV_ASSIGN_OR_RETURN(const std::vector<Method> methods, methods_of(arguments));
  POLYKV_ASSIGN_OR_RETURN(const std::string text, read_file(arguments.text, "text", kMaxTextBytes));
  POLYKV_ASSIGN_OR_RETURN(const UniqueFd file, open_file(arguments.model, "model"));
  POLYKV_ASSIGN_OR_RETURN(const Model model, Model::open(file.get(), arguments.model));
  POLYKV_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::from_gguf(model.gguf()));
  POLYKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> ids, tokenizer.encode(text));
  set_thread_count(arguments.thread_count);
  POLYKV_ASSIGN_OR_RETURN(Weights weights, Weights::load(model, arguments.thread_count));
  const ModelIdentity identity = model_identity(model.config(), weights.fingerprint());
  Transformer transformer(std::make_shared<const Weights>(std::move(weights)));
  const auto progress = [&](uint32_t window, const Method& method) {
    std::fprintf(stderr, "window %u of %u: %s\n", window + 1, arguments.protocol.window_count,
                 method.name.c_str());
  };
  POLYKV_ASSIGN_OR_RETURN(const std::vector<MethodResult> results,
                          run_protocol(arguments.protocol, identity, transformer, ids, methods,
                                       arguments.thread_count, progress));
  // K's and V's, of one window's context.
  const uint64_t context_values =
      KvCache::size_bytes(model.config(), arguments.protocol.context_tokens) / sizeof(float);
  arguments.json ? print_json(results, context_values) : print_table(results);
  return Status::ok();
}

int evaluate(int argument_count, char** argument_values) {
  wait_passively(argument_values);
  Arguments arguments;
  std::string through = "decode";
  CLI::App app("What codec profiles cost a model on a text", "polykv_eval");
  app.add_option("--model", arguments.model, "GGUF file")->required();
  app.add_option("--text", arguments.text, "text to read windows of")->required();
  app.add_option("--windows", arguments.protocol.window_count, "windows, evenly spaced")
      ->capture_default_str();
  app.add_option("--context", arguments.protocol.context_tokens,
                 "tokens of a window that pass through the codec")
      ->capture_default_str();
  app.add_option("--targets", arguments.protocol.target_tokens,
                 "tokens of a window that are scored")
      ->capture_default_str();
  app.add_option("--profiles", arguments.profiles, "profiles and baselines, separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--through", through, "how the scored tokens read the context: decode or attend")
      ->check(CLI::IsMember({"decode", "attend"}))
      ->capture_default_str();
  app.add_option(
         "--hostile", arguments.protocol.hostile_factor,
         "give the model key biases of so many standard deviations, and a sink in the middle")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--threads", arguments.thread_count, "threads")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_flag("--json", arguments.json, "print one JSON object");
  if (const auto code = parse_command_line(app, argument_count, argument_values)) return *code;
  arguments.protocol.attends = through == "attend";
  const Status status = run(arguments);
  if (!status.is_ok()) std::fprintf(stderr, "polykv_eval: %s\n", status.message().c_str());
  return static_cast<int>(status.code());
}

}  // namespace

}  // namespace polykv::eval

int main(int argument_count, char** argument_values) {
  try {
    return polykv::eval::evaluate(argument_count, argument_values);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "polykv_eval: out of memory; give a shorter --context or fewer --windows\n");
    return static_cast<int>(POLYKV_ERR_NO_MEMORY);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "polykv_eval: %s\n", error.what());
    return static_cast<int>(POLYKV_ERR_INTERNAL);
  }
}
