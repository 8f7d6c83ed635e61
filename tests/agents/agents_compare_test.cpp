// With the profile `exact` in fp32 an agent that decodes from the pool says what an agent that prefills by itself says.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

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

}  // namespace

TEST_CASE("answers to questions over GPL-3 are those of an agent without the pool") {
  const std::string model = model_path_or_skip();
  const char* question_count = std::getenv("POLYKV_QUESTION_COUNT");  // set by ctest
  DaemonProcess daemon;
  std::vector<std::string> arguments = {POLYKV_FIFTEEN_AGENTS,
                                        "compare",
                                        "--socket",
                                        daemon.socket_path(),
                                        "--model",
                                        model,
                                        "--weights",
                                        daemon.folder().path() + "/weights.f32",
                                        "--document",
                                        document_path(daemon.folder()),
                                        "--question-count",
                                        question_count == nullptr ? "20" : question_count};
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    ::execv(pointers[0], pointers.data());
    ::_exit(127);
  }
  const ExitStatus status =
      wait_for_exit(pid);  // its own output says the counts, and what differed
  INFO("polykvd: " << daemon.log());
  CHECK(!status.was_killed);
  CHECK(status.code == 0);
}
