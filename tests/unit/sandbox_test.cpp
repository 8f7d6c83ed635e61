#include "daemon/prefill/worker/sandbox.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <cstring>
#include <functional>

#include "common/mapping.h"
#include "common/memfd.h"
#include "common/packet_socket.h"
#include "tests/support/require_ok.h"

using namespace polykv;

namespace {

/// Runs `check` in a forked child that has entered the sandbox. True when it returned true.
bool holds_in_sandbox(const std::function<bool()>& check, const SandboxLimits& limits = {}) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    if (!enter_sandbox(limits).is_ok()) ::_exit(3);
    ::_exit(check() ? 0 : 4);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  INFO("wait status " << status);
  CHECK((!WIFEXITED(status) || WEXITSTATUS(status) != 3));  // the sandbox itself must work
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Not std::thread: the sanitizers check its virtual calls with a pipe, which the sandbox refuses.
class Thread {
 public:
  explicit Thread(std::function<void()> work) : work_(std::move(work)) {
    const auto run = [](void* self) -> void* {
      static_cast<Thread*>(self)->work_();
      return nullptr;
    };
    is_running_ = ::pthread_create(&thread_, nullptr, run, this) == 0;
  }
  bool join() { return is_running_ && ::pthread_join(thread_, nullptr) == 0; }

 private:
  std::function<void()> work_;
  pthread_t thread_{};
  bool is_running_ = false;
};

template <typename Call>
bool is_refused(Call call) {
  errno = 0;
  return call() == -1 && (errno == EPERM || errno == EACCES);
}

}  // namespace

TEST_CASE("the sandbox refuses to open or create files") {
  CHECK(holds_in_sandbox([] {
    return is_refused([] { return ::open("/proc/self/exe", O_RDONLY); }) &&
           is_refused([] { return ::open("/etc/passwd", O_RDONLY); }) &&
           is_refused([] { return ::open("/tmp", O_TMPFILE | O_WRONLY, 0600); }) &&
           is_refused([] { return ::creat("/tmp/polykv-sandbox-test", 0600); }) &&
           is_refused([] { return ::unlink("/tmp/polykv-sandbox-test"); }) &&
           is_refused([] { return ::mkdir("/tmp/polykv-sandbox-test", 0700); });
  }));
}

TEST_CASE("the sandbox refuses sockets and connections") {
  int pair[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, pair) == 0);
  const UniqueFd first(pair[0]), second(pair[1]);
  CHECK(holds_in_sandbox([&] {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, "/tmp/polykv-sandbox-test");
    const auto* target = reinterpret_cast<const sockaddr*>(&address);
    int ends[2];
    return is_refused([] { return ::socket(AF_INET, SOCK_STREAM, 0); }) &&
           is_refused([] { return ::socket(AF_UNIX, SOCK_STREAM, 0); }) &&
           is_refused([&] { return ::socketpair(AF_UNIX, SOCK_STREAM, 0, ends); }) &&
           is_refused([&] { return ::connect(pair[0], target, sizeof address); }) &&
           is_refused([&] { return ::bind(pair[0], target, sizeof address); }) &&
           is_refused([&] { return ::sendto(pair[0], "x", 1, 0, target, sizeof address); });
  }));
}

TEST_CASE("the sandbox refuses new processes and power over others") {
  const pid_t parent = ::getpid();
  CHECK(holds_in_sandbox([parent] {
    char* const arguments[] = {nullptr};
    return is_refused([&] { return ::execve("/bin/true", arguments, arguments); }) &&
           is_refused([] { return ::fork(); }) && is_refused([] { return ::vfork(); }) &&
           is_refused([parent] { return ::kill(parent, 0); }) &&
           is_refused([parent] { return ::ptrace(PTRACE_SEIZE, parent, nullptr, nullptr); }) &&
           is_refused([] { return ::prctl(PR_SET_DUMPABLE, 1); });
  }));
}

TEST_CASE("the sandbox lets open descriptors be read, and memory and threads be used") {
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  REQUIRE(file);
  CHECK(holds_in_sandbox([&] {
    char magic[4];
    if (::pread(file.get(), magic, sizeof magic, 0) != 4 || std::memcmp(magic, "\177ELF", 4) != 0)
      return false;
    constexpr size_t kBytes = size_t{8} << 20;
    void* memory =
        ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    std::memset(memory, 1, kBytes);
    ::munmap(memory, kBytes);
    int sum = 0;
    for (const int part : {1, 2}) {
      Thread thread([&] { sum += part; });
      if (!thread.join()) return false;
    }
    return sum == 3;
  }));
}

TEST_CASE("the sandbox lets packets and descriptors arrive, and token lists leave") {
  auto pair = packet_socketpair();
  REQUIRE_OK(pair);
  auto& [ours, theirs] = *pair;
  auto memfd = memfd_create_sealable("polykv-test");
  REQUIRE_OK(memfd);
  REQUIRE(::ftruncate(memfd->get(), 4096) == 0);
  const uint8_t hello = 7;
  const int fd = memfd->get();
  REQUIRE_OK(packet_send(ours.get(), {&hello, 1}, {&fd, 1}));
  CHECK(holds_in_sandbox([&, &theirs = theirs] {
    ReceivedPacket packet;
    if (!packet_receive(theirs.get(), packet).is_ok() || packet.fds.size() != 1) return false;
    auto mapping = Mapping::map(packet.fds[0].get(), 4096, MapAccess::read_write);
    if (!mapping.is_ok()) return false;
    mapping->writable_bytes()[17] = 42;
    const uint32_t ids[] = {1, 2, 3};
    auto list = memfd_from_tokens(ids);
    if (!list.is_ok() || !memfd_read_tokens(list->get(), 3, 10).is_ok()) return false;
    const int sent = list->get();
    auto result = packet_send(theirs.get(), {&hello, 1}, {&sent, 1});
    return result.is_ok() && *result == SocketResult::done;
  }));
  uint8_t written = 0;
  REQUIRE(::pread(memfd->get(), &written, 1, 17) == 1);
  CHECK(written == 42);
  ReceivedPacket reply;
  REQUIRE_OK(packet_receive(ours.get(), reply));
  REQUIRE(reply.fds.size() == 1);
  CHECK_OK(memfd_read_tokens(reply.fds[0].get(), 3, 10));
}

TEST_CASE("the sandbox holds for threads that were there before it") {
  CHECK(holds_in_sandbox([] { return true; }));
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    int before[2];
    int after[2];
    if (::pipe(before) != 0 || ::pipe(after) != 0) ::_exit(5);
    Thread thread([&] {
      char go = 0;
      if (::read(before[0], &go, 1) != 1) ::_exit(6);
      const bool refused = is_refused([] { return ::open("/etc/passwd", O_RDONLY); });
      go = refused ? 'y' : 'n';
      if (::write(after[1], &go, 1) != 1) ::_exit(7);
    });
    if (!enter_sandbox({}).is_ok()) ::_exit(3);
    char answer = 'g';
    if (::write(before[1], &answer, 1) != 1 || ::read(after[0], &answer, 1) != 1) ::_exit(8);
    thread.join();
    ::_exit(answer == 'y' ? 0 : 4);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("the sandbox limits private memory to what was promised") {
  SandboxLimits limits;
  limits.memory_bytes = uint64_t{64} << 20;
  CHECK(holds_in_sandbox(
      [] {
        const auto map = [](size_t bytes) {
          return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED;
        };
        return map(size_t{32} << 20) && !map(size_t{1} << 30) && errno == ENOMEM;
      },
      limits));
}

TEST_CASE("with a GPU the sandbox lets its driver's requests through, and nothing else besides") {
  // A terminal would take input for its shell by TIOCSTI.
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const UniqueFd reader(ends[0]), writer(ends[1]);
  constexpr unsigned long kFrontend = 0xc0304627;  // as of /dev/nvidiactl: _IOWR('F', 0x27, ...)
  const auto reaches_the_file = [&](unsigned long request) {
    errno = 0;
    return ::ioctl(reader.get(), request, nullptr) == -1 && errno == ENOTTY;
  };
  const auto refuses = [&](unsigned long request) {
    return is_refused([&] { return ::ioctl(reader.get(), request, nullptr); });
  };
  const auto check = [&] {
    return reaches_the_file(kFrontend) && reaches_the_file(0xffffffff00000000UL | kFrontend) &&
           reaches_the_file(33) && reaches_the_file(0x30000001) && refuses(TIOCSTI) &&
           refuses(TCSETS) && refuses(FIONREAD) && ::eventfd(0, EFD_CLOEXEC) >= 0 &&
           is_refused([] { return ::open("/dev/null", O_RDWR); }) &&
           is_refused([] { return ::socket(AF_UNIX, SOCK_STREAM, 0); }) &&
           is_refused([] { return ::fork(); });
  };
  CHECK(holds_in_sandbox(check, {.uses_gpu = true}));
  CHECK(holds_in_sandbox([&] {
    return refuses(kFrontend) && refuses(33) && is_refused([] { return ::eventfd(0, 0); });
  }));
}

TEST_CASE("the sandbox leaves no core file and cannot be traced") {
  CHECK(holds_in_sandbox([] {
    rlimit core{};
    return ::getrlimit(RLIMIT_CORE, &core) == 0 && core.rlim_max == 0;
  }));
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const bool hardened = harden_process().is_ok() && ::prctl(PR_GET_DUMPABLE) == 0 &&
                          ::prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1;
    ::_exit(hardened ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
