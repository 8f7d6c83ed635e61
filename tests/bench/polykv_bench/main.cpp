// Speed of the codecs and of the pool, against what this machine's memory and other programs do in
// the same run. Each result is compared with the reference before it is timed; a wrong one ends the
// run with exit code 1.
//
//   polykv_bench attend|decode|encode|attach [--json] [options]
#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <thread>

#include "common/command_line.h"
#include "tests/bench/polykv_bench/bandwidth.h"
#include "tests/bench/polykv_bench/commands.h"
#include "tests/bench/polykv_bench/measure.h"

using namespace polykv::bench;

namespace {

void report_bandwidth(const Options& options, Report& report) {
  for (const uint32_t threads : options.threads) {
    const Memory memory(threads, options.memory_bytes());
    double read = 0;
    double copy = 0;
    double fill = 0;
    double widen = 0;
    for (uint32_t i = 0; i < options.rounds; ++i) {
      read = std::max(read, memory.read());
      copy = std::max(copy, memory.copy());
      fill = std::max(fill, memory.fill());
      widen = std::max(widen, memory.widen());
    }
    const std::string suffix = "_gb_per_s_" + std::to_string(threads) + "_threads";
    report.set(("read" + suffix).c_str(), read / 1e9);
    report.set(("copy" + suffix).c_str(), copy / 1e9);
    report.set(("fill" + suffix).c_str(), fill / 1e9);
    report.set(("widen" + suffix).c_str(), widen / 1e9);
  }
}

using Command = void (*)(const Options&, Report&);

void add_options(CLI::App& app, Options& options) {
  const CLI::Range counts(1, 1 << 24);
  app.add_option("--codec", options.codecs, "codec profiles")
      ->delimiter(',')
      ->check([](const std::string& name) {
        return polykv::profile_from_name(name) ? "" : "there is no codec profile " + name;
      });
  app.add_option("--dtype", options.dtypes, "of decode's targets")
      ->delimiter(',')
      ->check(CLI::IsMember({"f16", "bf16", "f32"}));
  app.add_option("--head-dim", options.head_dims, "of K and V")
      ->delimiter(',')
      ->check(CLI::Range(1, 256));
  app.add_option("--group", options.groups, "heads of a kv_head")->delimiter(',')->check(counts);
  app.add_option("--queries", options.query_rows, "query rows of attend")
      ->delimiter(',')
      ->check(counts);
  app.add_option("--threads", options.threads, "threads")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024));
  app.add_option("--tokens", options.tokens, "of the document")->check(counts);
  app.add_option("--kv-heads", options.kv_heads)->check(counts);
  app.add_option("--layers", options.layers, "0: as many as make --mib")
      ->check(CLI::Range(0, 4096));
  app.add_option("--mib", options.mib, "packed bytes of all layers")->check(counts);
  app.add_option("--memory-mib", options.memory_mib,
                 "of each buffer that the memory is measured with; more than the caches hold")
      ->check(counts);
  app.add_option("--rounds", options.rounds)->check(counts);
  app.add_option("--attaches", options.attaches, "of attach")->check(counts);
  app.add_flag("--head-major", options.head_major, "decode to [kv_head, token, dim]");
  app.add_option("--peers", options.peers_path, "what scripts/bench-peers printed");
  app.add_flag("--json", options.as_json, "one JSON object instead of a table");
  app.add_flag("--cpu-time", options.cpu_time,
               "count the process's time on processors, divided by the threads: for busy machines");
  app.add_flag("--spoil", options.spoils, "alter what is verified: the run has to fail");
}

int run(const Options& options, Command command) {
  try {
    use_clock(options.cpu_time ? Clock::cpu : Clock::wall);
    Report report(options);
    report_bandwidth(options, report);
    command(options, report);
    report.print();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "polykv_bench: %s\n", error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Speed of the codecs and of the pool; every result is verified before it is timed");
  Options options;
  options.threads = {1, std::max(1U, std::thread::hardware_concurrency())};
  app.require_subcommand(1);
  struct Named {
    const char* name;
    const char* help;
    Command command;
  };
  constexpr Named kCommands[] = {
      {"attend", "attention to a document in place, a call a layer", bench_attend},
      {"decode", "documents into an agent's own cache", bench_decode},
      {"encode", "layers of fp16 into touched memory", bench_encode},
      {"attach", "from acquire to the first layer view", bench_attach}};
  Command chosen = nullptr;
  for (const Named& named : kCommands) {
    CLI::App* sub = app.add_subcommand(named.name, named.help);
    add_options(*sub, options);
    sub->callback([&chosen, command = named.command] { chosen = command; });
  }
  if (const auto code = polykv::parse_command_line(app, argc, argv)) return *code;
  return run(options, chosen);
}
