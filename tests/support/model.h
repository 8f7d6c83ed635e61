// Tests on the real model: POLYKV_TEST_MODEL is the path of SmolLM2-135M-Instruct's GGUF
// (scripts/fetch-model prints it).
#pragma once

#include <fcntl.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "common/fd.h"

namespace polykv::test {

/// The path, or the end of the program with "skipped" (exit code 77) when the variable is not set.
inline std::string model_path_or_skip() {
  const char* path = std::getenv("POLYKV_TEST_MODEL");
  if (path == nullptr || *path == '\0') {
    std::puts(
        "skipped: POLYKV_TEST_MODEL is not set; export POLYKV_TEST_MODEL=$(scripts/fetch-model)");
    std::fflush(stdout);
    std::_Exit(77);
  }
  return path;
}

inline UniqueFd open_file(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw std::runtime_error("cannot open " + path);
  return fd;
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

constexpr const char* kGpl3Path = "/usr/share/common-licenses/GPL-3";

}  // namespace polykv::test
