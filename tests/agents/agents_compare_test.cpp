// Agents say the same whichever way they read a document: with `exact` in fp32 what an agent that prefills by itself says,
// with a lossy profile what it decodes to. And reading in place costs an agent no memory for the document.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/daemon_process.h"
#include "tests/support/model.h"

using namespace polykv::test;

namespace {

/// All of GPL-3, or as much of its begin as ctest says: prefilling it is most of the time.
std::string document_path(const TemporaryFolder& folder) {
  const char* byte_count = std::getenv("POLYKV_DOCUMENT_BYTES");
  if (byte_count == nullptr) return kGpl3Path;
  std::ifstream file(kGpl3Path, std::ios::binary);
  std::string text(std::stoul(byte_count), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  REQUIRE(file.good());
  return folder.write("begin-of-gpl-3", text);
}

/// What ctest says, or how much a person waits for.
std::string count_from(const char* variable, const char* otherwise) {
  const char* count = std::getenv(variable);
  return count == nullptr ? otherwise : count;
}

/// Its own output says the figures, and what differed.
void run_agents(const std::string& command, const std::vector<std::string>& more) {
  const std::string model = model_path_or_skip();
  static DaemonProcess daemon;  // the cases share its worker and the weights' file
  std::vector<std::string> arguments = {POLYKV_FIFTEEN_AGENTS,
                                        command,
                                        "--socket",
                                        daemon.socket_path(),
                                        "--model",
                                        model,
                                        "--weights",
                                        daemon.folder().path() + "/weights.f32",
                                        "--document",
                                        document_path(daemon.folder())};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    ::execv(pointers[0], pointers.data());
    ::_exit(127);
  }
  const ExitStatus status = wait_for_exit(pid);
  INFO("polykvd: " << daemon.log());
  REQUIRE(!status.was_killed);
  REQUIRE(status.code == 0);
}

}  // namespace

TEST_CASE("answers to questions over GPL-3 are those of an agent without the pool") {
  run_agents("compare", {"--question-count", count_from("POLYKV_QUESTION_COUNT", "20")});
}

TEST_CASE("an agent that attends to a document says what one says that decodes it") {
  run_agents("compare", {"--question-count", count_from("POLYKV_QUESTION_COUNT", "20"), "--codec",
                         "k5v4", "--near-tie", "0.05"});
}

TEST_CASE("an agent that attends to a document has no memory of its own for it") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/figures.json";
  run_agents("run", {"--agents", count_from("POLYKV_AGENT_COUNT", "15"), "--max-tokens", "4",
                     "--attend-tokens", "64", "--json", path});
  const nlohmann::json figures = nlohmann::json::parse(read_file(path));
  CHECK(figures["pool_private_bytes"] == 0);
  // Each agent against the one that was asked the same over the document's first 64 tokens.
  const std::vector<int64_t> growth = figures["attend_growth_bytes"];
  const std::vector<int64_t> short_growth = figures["short_growth_bytes"];
  REQUIRE(growth.size() == short_growth.size());
  for (size_t i = 0; i < growth.size(); ++i) {
    INFO("agent " << i << ": " << growth[i] << " bytes, " << short_growth[i]
                  << " over the first 64 tokens");
    CHECK(std::abs(growth[i] - short_growth[i]) <= int64_t{4} << 20);
    // A check of the check: decoded it is the agent's own memory.
    CHECK(figures["decode_growth_bytes"][i] > growth[i] + int64_t(figures["bf16_bytes"]));
  }
  CHECK(figures["answers_different"] == 0);
}
