// Runs a program to its end and keeps what it wrote. Throws std::runtime_error.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/fd.h"
#include "tests/support/user.h"

namespace polykv::test {

struct ProgramRun {
  int exit_code = -1;  // -1: killed
  std::string output;
  std::string errors;
};

struct ProgramInput {
  std::string text;                      // of standard input
  std::vector<std::string> environment;  // "NAME=value" beyond the test's own
  std::optional<uid_t> user;             // instead of the test's own, which must be root then
};

inline UniqueFd memory_file(const std::string& text) {
  UniqueFd fd(::memfd_create("polykv-test", MFD_CLOEXEC));
  if (!fd || ::write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
      ::lseek(fd.get(), 0, SEEK_SET) != 0) {
    throw std::runtime_error("cannot make a file in memory");
  }
  return fd;
}

inline std::string memory_text(const UniqueFd& fd) {
  std::string text(static_cast<size_t>(::lseek(fd.get(), 0, SEEK_END)), '\0');
  if (::pread(fd.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    throw std::runtime_error("cannot read a file in memory");
  return text;
}

inline ProgramRun run_program(const std::string& program, std::vector<std::string> arguments,
                              const ProgramInput& input = {}) {
  // Files and not pipes: a full pipe would need a thread of its own.
  const UniqueFd in = memory_file(input.text);
  const UniqueFd out = memory_file("");
  const UniqueFd err = memory_file("");
  arguments.insert(arguments.begin(), program);
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error("cannot fork");
  if (pid == 0) {
    ::dup2(in.get(), STDIN_FILENO);
    ::dup2(out.get(), STDOUT_FILENO);
    ::dup2(err.get(), STDERR_FILENO);
    if (input.user) become_user(*input.user);
    for (const std::string& entry : input.environment) ::putenv(::strdup(entry.c_str()));
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    ::execv(pointers[0], pointers.data());
    ::_exit(127);
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) throw std::runtime_error("waitpid failed");
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, memory_text(out), memory_text(err)};
}

}  // namespace polykv::test
