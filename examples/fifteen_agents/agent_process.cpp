#include "examples/fifteen_agents/agent_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <utility>

extern char** environ;

namespace polykv::example {

Result<AgentProcess> AgentProcess::start(const std::vector<std::string>& arguments) {
  int to_agent[2];
  int from_agent[2];
  if (::pipe2(to_agent, O_CLOEXEC) != 0) return system_error("make a pipe", errno);
  AgentProcess process;
  process.input_.reset(to_agent[1]);
  const UniqueFd agent_input(to_agent[0]);
  if (::pipe2(from_agent, O_CLOEXEC) != 0) return system_error("make a pipe", errno);
  const UniqueFd agent_output(from_agent[1]);
  process.output_.reset(::fdopen(from_agent[0], "r"));

  std::vector<std::string> words = {"fifteen_agents"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, agent_input.get(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, agent_output.get(), STDOUT_FILENO);
  const int error =
      ::posix_spawn(&process.pid_, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    process.pid_ = -1;
    return system_error("start an agent process", error);
  }
  return process;
}

AgentProcess::AgentProcess(AgentProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      input_(std::move(other.input_)),
      output_(std::move(other.output_)) {}

AgentProcess::~AgentProcess() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

Result<nlohmann::json> AgentProcess::expect(const std::string& event) {
  char* line = nullptr;
  size_t capacity = 0;
  const ssize_t length = ::getline(&line, &capacity, output_.get());
  const std::unique_ptr<char, decltype(&std::free)> owner(line, &std::free);
  if (length < 0) {
    return {POLYKV_ERR_INTERNAL,
            format("read from agent %d: it ended while '%s' was expected", pid_, event.c_str())};
  }
  const nlohmann::json message = nlohmann::json::parse(line, line + length, nullptr, false);
  if (message.is_discarded() || !message.contains("event")) {
    return {POLYKV_ERR_INTERNAL,
            format("read from agent %d: '%.200s' is not a message", pid_, line)};
  }
  if (message["event"] == "error") {
    return {POLYKV_ERR_INTERNAL,
            format("agent %d: %s", pid_, message["message"].get<std::string>().c_str())};
  }
  if (message["event"] != event) {
    return {POLYKV_ERR_INTERNAL,
            format("read from agent %d: '%s' instead of '%s'", pid_,
                   message["event"].get<std::string>().c_str(), event.c_str())};
  }
  return message;
}

Status AgentProcess::tell(const std::string& word) {
  const std::string line = word + "\n";
  if (::write(input_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    return system_error(format("write to agent %d", pid_), errno);
  }
  return Status::ok();
}

Status AgentProcess::finish() {
  POLYKV_RETURN_IF_ERROR(tell("exit"));
  int state = 0;
  const pid_t pid = std::exchange(pid_, -1);
  if (::waitpid(pid, &state, 0) != pid)
    return system_error(format("wait for agent %d", pid), errno);
  if (!WIFEXITED(state) || WEXITSTATUS(state) != 0) {
    return {POLYKV_ERR_INTERNAL, format("agent %d ended with wait status %d", pid, state)};
  }
  return Status::ok();
}

namespace {

/// "Rss:      12 kB", of that field or of none.
uint64_t field_bytes(const std::string& line, std::string_view field) {
  unsigned long long kib = 0;
  if (line.rfind(field, 0) != 0) return 0;
  return std::sscanf(line.c_str() + field.size(), ": %llu", &kib) == 1 ? kib * 1024 : 0;
}

}  // namespace

Result<PoolMappings> pool_mappings(pid_t pid) {
  std::ifstream smaps(format("/proc/%d/smaps", pid));
  if (!smaps)
    return {POLYKV_ERR_SYSTEM, format("read the mappings of process %d: no /proc entry", pid)};
  PoolMappings sum;
  bool is_pool = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.find('-') < line.find(' ')) {  // "start-end perms ...": a mapping begins
      is_pool = line.find("/memfd:polykv-segment") != std::string::npos;
    } else if (is_pool) {
      sum.size_bytes += field_bytes(line, "Size");
      sum.rss_bytes += field_bytes(line, "Rss");
      sum.pss_bytes += field_bytes(line, "Pss");
      sum.private_bytes += field_bytes(line, "Private_Clean") + field_bytes(line, "Private_Dirty");
    }
  }
  return sum;
}

Result<uint64_t> private_bytes(pid_t pid) {
  std::ifstream smaps(format("/proc/%d/smaps_rollup", pid));
  if (!smaps)
    return {POLYKV_ERR_SYSTEM, format("read the memory of process %d: no /proc entry", pid)};
  uint64_t sum = 0;
  for (std::string line; std::getline(smaps, line);)
    sum += field_bytes(line, "Private_Clean") + field_bytes(line, "Private_Dirty");
  return sum;
}

}  // namespace polykv::example
