// Options of polykvd: file, flags, and what derives from them.
#include "daemon/options.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

#include "daemon/limits.h"
#include "tests/support/require_ok.h"
#include "tests/support/temporary_folder.h"

using namespace polykv;
using namespace polykv::daemon;

namespace {
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
Result<Options> read_flags(std::vector<std::string> arguments) {
  return read_options({std::move(arguments), "/nonexistent", "/nonexistent", false});
}
std::string config_error(const std::string& toml) {
  Options options;
  const Status status = apply_config(options, toml, "test.toml");
  CHECK(status.code() == POLYKV_ERR_INVALID_ARGUMENT);
  return status.message();
}
}  // namespace

TEST_CASE("sizes have binary units") {
  CHECK(*parse_bytes("4096") == 4096);
  CHECK(*parse_bytes("8GiB") == uint64_t{8} << 30);
  CHECK(*parse_bytes("512 MB") == uint64_t{512} << 20);
  CHECK(*parse_bytes("2k") == 2048);
  CHECK(*parse_bytes("1T") == uint64_t{1} << 40);
  for (const char* text : {"", "GiB", "5x", "-1", "99999999999999999999", "20000000T"})
    CHECK(!parse_bytes(text).is_ok());
}

TEST_CASE("durations have units, milliseconds without one") {
  CHECK(*parse_duration_ms("30s") == 30'000);
  CHECK(*parse_duration_ms("250") == 250);
  CHECK(*parse_duration_ms("5 min") == 300'000);
  CHECK(*parse_duration_ms("1h") == 3'600'000);
  for (const char* text : {"", "s", "5d", "9999999999h"}) CHECK(!parse_duration_ms(text).is_ok());
}

TEST_CASE("what polykv-prefill computes with can be chosen") {
  CHECK(read_flags({})->worker_device == WorkerDevice::automatic);
  CHECK(read_flags({"--worker-device", "cpu"})->worker_device == WorkerDevice::cpu);
  Options options;
  REQUIRE_OK(apply_config(options, "[worker]\ndevice = \"cuda\"\n", "test.toml"));
  CHECK(options.worker_device == WorkerDevice::cuda);
  CHECK(contains(config_error("[worker]\ndevice = \"gpu\"\n"), "auto, cpu or cuda"));
}

TEST_CASE("a file sets what it names and leaves the rest") {
  Options options;
  const Status status = apply_config(options,
                                     "budget = \"2GiB\"\n"
                                     "[limits]\n"
                                     "connections_per_user = 7\n"
                                     "[models]\n"
                                     "small = \"/models/small.gguf\"\n"
                                     "large = \"/models/large.gguf\"\n",
                                     "test.toml");
  INFO(status.message());
  REQUIRE_OK(status);
  CHECK(options.budget_bytes == uint64_t{2} << 30);
  CHECK(options.connections_per_user == 7);
  CHECK(options.stall_deadline_ms == 30'000);
  REQUIRE(options.models.size() == 2);
  for (const ConfiguredModel& model : options.models)
    CHECK(model.path == "/models/" + model.name + ".gguf");
}

TEST_CASE("an unknown key is an error that names file, line, key and remedy") {
  const std::string message = config_error("budget = \"1GiB\"\n[limits]\nconections = 5\n");
  CHECK(contains(message, "test.toml, line 3"));
  CHECK(contains(message, "limits.conections"));
  CHECK(contains(message, "limits.connections_per_user"));
}

TEST_CASE("a wrong value is an error that names its place") {
  CHECK(contains(config_error("\nbudget = \"much\"\n"), "line 2, key 'budget'"));
  CHECK(contains(config_error("budget = 1.5\n"), "key 'budget'"));
  CHECK(contains(config_error("stall_deadline = \"0s\"\n"), "longer than 0"));
  CHECK(contains(config_error("[models]\nm = \"relative.gguf\"\n"), "not absolute"));
  CHECK(contains(config_error("[models.m]\npath = \"/m\"\n"), "key 'models.m'"));
  CHECK(contains(config_error("budget = \n"), "TOML syntax"));
}

TEST_CASE("flags win over the file") {
  const std::filesystem::path file = std::filesystem::temp_directory_path() /
                                     ("polykv-options-" + std::to_string(::getpid()) + ".toml");
  std::ofstream(file) << "budget = \"1GiB\"\nlog_level = \"warn\"\n";
  const auto options = read_flags({"--config", file.string(), "--budget", "3GiB"});
  std::filesystem::remove(file);
  REQUIRE_OK(options);
  CHECK(options->budget_bytes == uint64_t{3} << 30);
  CHECK(options->log_level == "warn");
}

TEST_CASE("a missing default file is fine, a missing --config is not") {
  CHECK_OK(read_flags({}));
  const auto options = read_flags({"--config", "/nonexistent/x.toml"});
  REQUIRE(!options.is_ok());
  CHECK(contains(options.status().message(), "/nonexistent/x.toml"));
}

TEST_CASE("a configuration that is no readable file is told, and not taken for none") {
  const std::string folder = std::filesystem::temp_directory_path();
  for (const auto& [path, cause] : {std::pair<std::string, const char*>{folder, "it is a folder"},
                                    {"/dev/zero", "more than 1 MiB"}}) {
    const auto options = read_flags({"--config", path});
    REQUIRE(!options.is_ok());
    CHECK(options.status().code() == POLYKV_ERR_INVALID_ARGUMENT);
    CHECK(contains(options.status().message(), path));
    CHECK(contains(options.status().message(), cause));
  }
  // In the place of the user's own file as well.
  const test::TemporaryFolder home;
  std::filesystem::create_directories(home.path() + "/polykv/polykvd.toml");
  const auto options = read_options({{}, home.path(), "", false});
  REQUIRE(!options.is_ok());
  CHECK(contains(options.status().message(), "polykvd.toml"));
}

TEST_CASE("the user's file is read before the system's") {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("polykv-config-" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder / "polykv");
  std::ofstream(folder / "polykv/polykvd.toml") << "budget = \"5GiB\"\n";
  const auto options = read_options({{}, folder.string(), "", false});
  std::filesystem::remove_all(folder);
  REQUIRE_OK(options);
  CHECK(options->budget_bytes == uint64_t{5} << 30);
}

TEST_CASE("unknown and malformed flags are errors with a remedy") {
  for (const std::vector<std::string>& flags : {std::vector<std::string>{"--bogus"},
                                                {"--budget", "much"},
                                                {"--peer-pidfd", "maybe"},
                                                {"--model", "nopath"},
                                                {"--socket-mode", "999"}}) {
    const auto options = read_flags(flags);
    REQUIRE(!options.is_ok());
    CHECK(options.status().code() == POLYKV_ERR_INVALID_ARGUMENT);
    CHECK(contains(options.status().message(), "read the flags"));
  }
}

TEST_CASE("a model's name and path come from a flag as well") {
  const auto options = read_flags({"--model", "a=/m/a.gguf", "--model", "b=/m/b=c.gguf"});
  REQUIRE_OK(options);
  REQUIRE(options->models.size() == 2);
  CHECK(options->models[1].path == "/m/b=c.gguf");
}

TEST_CASE("capacities follow from the machine: half its memory, and its descriptors") {
  const auto limits = derive_limits(Options{}, {uint64_t{8} << 30, 1024, 2});
  REQUIRE_OK(limits);
  CHECK(limits->budget_bytes == uint64_t{4} << 30);
  CHECK(limits->pool_thread_count == 2);
  // Worst case: every connection and every segment at once.
  CHECK(limits->session_count_max * 4 + limits->segment_count_max * 2 <= 1024);
}

TEST_CASE("a descriptor limit that is too low is named") {
  const auto limits = derive_limits(Options{}, {uint64_t{8} << 30, 64, 2});
  REQUIRE(!limits.is_ok());
  CHECK(contains(limits.status().message(), "RLIMIT_NOFILE is 64"));
}
