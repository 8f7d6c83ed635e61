#include "device/probe.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "common/fd.h"
#include "device/library.h"

namespace polykv::device {

namespace {

constexpr int64_t kAnswerMs = 30'000;

int64_t now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

constexpr uint64_t kProbeBytes = kGranularityBytes;

/// What we write, and what the helper answers: the same, turned over.
using Pattern = std::array<uint8_t, 4096>;

Result<Pattern> random_pattern() {
  Pattern pattern{};
  if (::getrandom(pattern.data(), 256, 0) != 256) return system_error("draw random numbers", errno);
  for (size_t i = 256; i < pattern.size(); ++i)
    pattern[i] = static_cast<uint8_t>(pattern[i - 256] * 31 + i);
  return pattern;
}
Pattern turned_over(Pattern pattern) {
  for (uint8_t& byte : pattern) byte = static_cast<uint8_t>(~byte);
  return pattern;
}

template <size_t size>
std::string hex(const std::array<uint8_t, size>& bytes) {
  std::string text;
  for (const uint8_t byte : bytes) text += format("%02x", byte);
  return text;
}
template <size_t size>
bool from_hex(const std::string& text, std::array<uint8_t, size>& bytes) {
  if (text.size() != 2 * size) return false;
  for (size_t i = 0; i < size; ++i) {
    const char* const digits = text.data() + 2 * i;
    if (std::from_chars(digits, digits + 2, bytes[i], 16).ptr != digits + 2) return false;
  }
  return true;
}

/// Frees what the probe allocated.
class Allocation {
 public:
  Allocation(Runtime& runtime, void* pointer) : runtime_(runtime), pointer_(pointer) {}
  ~Allocation() { static_cast<void>(runtime_.free(pointer_).is_ok()); }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  void* get() const { return pointer_; }

 private:
  Runtime& runtime_;
  void* pointer_;
};

// ---- the helper --------------------------------------------------------------------------------

Result<int> find_index(Runtime& runtime, const Uuid& uuid) {
  POLYKV_ASSIGN_OR_RETURN(const std::vector<DeviceInfo> devices, runtime.devices());
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].uuid == uuid) return static_cast<int>(i);
  }
  return {POLYKV_ERR_WRONG_DEVICE, "find " + uuid_text(uuid) + ": it is not there"};
}

/// "LIBRARY UUID HANDLE" -> the first bytes of what was exported, after answering into it.
Result<Pattern> answer(const std::vector<std::string>& arguments) {
  Uuid uuid{};
  IpcHandle handle{};
  if (arguments.size() != 3 || !from_hex(arguments[1], uuid) || !from_hex(arguments[2], handle))
    return {POLYKV_ERR_INVALID_ARGUMENT, "this flag is polykvd's own"};
  POLYKV_ASSIGN_OR_RETURN(Runtime* const runtime, load_runtime(arguments[0]));
  POLYKV_ASSIGN_OR_RETURN(const int index, find_index(*runtime, uuid));
  POLYKV_RETURN_IF_ERROR(runtime->use_device(index));
  POLYKV_ASSIGN_OR_RETURN(void* const pointer, runtime->open(handle));
  Pattern pattern{};
  Status status = runtime->copy_to_host(pattern.data(), pointer, pattern.size());
  const Pattern reply = turned_over(pattern);
  if (status.is_ok()) status = runtime->copy_to_device(pointer, reply.data(), reply.size());
  const Status closed = runtime->close(pointer);
  if (!status.is_ok()) return status;
  if (!closed.is_ok()) return closed;
  return pattern;
}

// ---- the daemon's side -------------------------------------------------------------------------

/// The helper's line; empty when it ended, or was ended, without one.
Result<std::string> ask_helper(std::vector<std::string> arguments) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return system_error("make a pipe", errno);
  const UniqueFd from_helper(ends[0]);
  UniqueFd to_us(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, to_us.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  std::vector<char*> pointers;
  pointers.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  pid_t helper = 0;
  const int error =
      ::posix_spawn(&helper, "/proc/self/exe", &actions, &attributes, pointers.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  to_us.reset();
  if (error != 0) return system_error("start a helper", error);

  std::string line;
  const int64_t give_up_ms = now_ms() + kAnswerMs;
  while (line.size() < size_t{64} << 10) {
    const int64_t left_ms = give_up_ms - now_ms();
    pollfd entry{from_helper.get(), POLLIN, 0};
    const int ready = left_ms <= 0 ? 0 : ::poll(&entry, 1, static_cast<int>(left_ms));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) break;
    std::array<char, 4096> text{};
    const ssize_t got = ::read(from_helper.get(), text.data(), text.size());
    if (got <= 0) break;
    line.append(text.data(), static_cast<size_t>(got));
  }
  ::kill(helper, SIGKILL);  // our own unreaped child: it has answered, or never will
  int status = 0;
  while (::waitpid(helper, &status, 0) < 0 && errno == EINTR) {
  }
  return line;
}

Surroundings look_around(const std::string& device_name) {
  Surroundings around;
  std::ifstream version("/proc/version");
  std::getline(version, around.kernel_version);
  around.device_name = device_name;
  // The number of the machine's first PID namespace is a constant of the kernel.
  std::array<char, 64> name{};
  const ssize_t length = ::readlink("/proc/self/ns/pid", name.data(), name.size() - 1);
  around.is_container = (length > 0 && std::strcmp(name.data(), "pid:[4026531836]") != 0) ||
                        ::access("/.dockerenv", F_OK) == 0 ||
                        ::access("/run/.containerenv", F_OK) == 0;
  return around;
}

}  // namespace

std::string causes_of_failure(const Surroundings& around) {
  std::vector<std::string> here;
  std::vector<std::string> elsewhere;
  const auto add = [&](bool is_here, const char* cause) {
    (is_here ? here : elsewhere).emplace_back(cause);
  };
  add(around.kernel_version.find("icrosoft") != std::string::npos, "WSL2");
  add(around.device_name.find("MIG") != std::string::npos, "a MIG instance");
  add(around.is_container, "a container with a PID namespace of its own");
  elsewhere.emplace_back("processes of different users");
  const auto list = [](const std::vector<std::string>& causes) {
    std::string text;
    for (const std::string& cause : causes) text += (text.empty() ? "" : ", ") + cause;
    return text;
  };
  const std::string known = "; known not to allow it: " + list(elsewhere);
  return here.empty() ? known.substr(2) : "this looks like " + list(here) + known;
}

int run_probe_helper(const std::vector<std::string>& arguments) {
  const Result<Pattern> pattern = answer(arguments);
  if (pattern) {
    std::printf("ok %s\n", hex(*pattern).c_str());
  } else {
    std::printf("%d %s\n", static_cast<int>(pattern.status().code()),
                pattern.status().message().c_str());
  }
  return 0;
}

Status probe_device(Runtime& runtime, int index, const DeviceInfo& info,
                    const std::string& library) {
  const auto failed = [&](const std::string& why) {
    return Status(POLYKV_ERR_UNSUPPORTED, "share memory of " + info.name +
                                              " with another process: " + why + "; " +
                                              causes_of_failure(look_around(info.name)));
  };
  POLYKV_RETURN_IF_ERROR(runtime.use_device(index));
  POLYKV_ASSIGN_OR_RETURN(void* const pointer, runtime.allocate(kProbeBytes));
  const Allocation allocation(runtime, pointer);
  POLYKV_ASSIGN_OR_RETURN(const Pattern pattern, random_pattern());
  POLYKV_RETURN_IF_ERROR(runtime.copy_to_device(allocation.get(), pattern.data(), pattern.size()));
  const Result<IpcHandle> handle = runtime.export_handle(allocation.get());
  if (handle.status().code() == POLYKV_ERR_DEVICE_LOST) return handle.status();
  if (!handle) return failed(handle.status().message());
  POLYKV_ASSIGN_OR_RETURN(const std::string line, ask_helper({"polykv", kProbeFlag, library,
                                                              hex(info.uuid), hex(*handle)}));
  if (line.empty()) return failed("the helper that was to open it gave no answer");
  if (!line.starts_with("ok ")) {
    const size_t end = std::min(line.find('\n'), line.size());
    const size_t space = std::min(line.find(' ') + 1, end);
    return failed(line.substr(space, end - space));
  }
  if (line != "ok " + hex(pattern) + "\n") return failed("the helper read other bytes");
  Pattern reply{};
  POLYKV_RETURN_IF_ERROR(runtime.copy_to_host(reply.data(), allocation.get(), reply.size()));
  if (reply != turned_over(pattern)) return failed("what the helper wrote does not arrive");
  return Status::ok();
}

}  // namespace polykv::device
