// What this machine's driver does when processes share device memory. Asked by scripts/gpu-probe;
// the questions, and what the design of the cuda backing makes of the answers, are in docs/gpu.md.
//
// The coordinator never touches CUDA. It starts puppets, each this program executed anew (a CUDA
// context does not survive fork), and tells them over a socket pair what to do; so an exporter can
// be killed and an importer can be another user, and a puppet that hangs costs its step a deadline
// and nothing else.
//
// The numbers are facts of the driver, never judged as good or bad: each step prints what happened.
// Exit code: 0 when the table was printed, 77 when there is no device to ask, 1 when the probe
// itself failed.
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "gpu_probe_puppet.h"

namespace {

constexpr int kStepTimeoutMs = 10'000;
constexpr int kTotalTimeoutMs = 40'000;
constexpr uint64_t kLargeBytes = 512 * kMiB;
constexpr unsigned kOtherUser = 54321;  // an id without privileges; no account is needed

using Clock = std::chrono::steady_clock;
Clock::time_point total_deadline, step_deadline;

struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Puppet {
 public:
  explicit Puppet(unsigned user = 0) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
      throw Unavailable("socketpair failed");
    socket_ = pair[0];
    std::string user_text = std::to_string(user);
    char program[] = "gpu_probe", role[] = "puppet";
    char* arguments[] = {program, role, user_text.data(), nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pair[1], kPuppetSocket);
    const int error = posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(pair[1]);
    if (error != 0) throw Unavailable(std::string("posix_spawn: ") + strerror(error));
  }
  ~Puppet() {
    kill_now();
    close(socket_);
  }
  Puppet(const Puppet&) = delete;
  Puppet& operator=(const Puppet&) = delete;

  // A process stuck in the driver cannot be waited for without end.
  void kill_now() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    for (int i = 0; i < 200 && waitpid(pid_, nullptr, WNOHANG) == 0; ++i) usleep(10'000);
    pid_ = -1;
  }

  Reply ask(const Request& request, int fd_to_send = -1, int* received_fd = nullptr) {
    if (!send_packet(socket_, &request, sizeof request, fd_to_send))
      throw Unavailable("a probe process ended");
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(step_deadline - Clock::now());
    pollfd event{socket_, POLLIN, 0};
    if (left.count() <= 0 || poll(&event, 1, static_cast<int>(left.count())) <= 0)
      throw Unavailable("no answer from the driver before the step's deadline");
    Reply reply{};
    int fd = -1;
    if (!receive_packet(socket_, &reply, sizeof reply, &fd))
      throw Unavailable("a probe process ended");
    if (received_fd != nullptr)
      *received_fd = fd;
    else if (fd >= 0)
      close(fd);
    return reply;
  }

  // The same, where a failure means that the step's question cannot be asked.
  Reply must(const Request& request, int* received_fd = nullptr) {
    const Reply reply = ask(request, -1, received_fd);
    if (reply.failed != 0) throw Unavailable(reply.text);
    return reply;
  }

 private:
  int socket_ = -1;
  pid_t pid_ = -1;
};

Request request_of(Op op) {
  Request request{};
  request.op = op;
  return request;
}
Request allocate(Op op, uint64_t bytes, uint32_t byte) {
  Request request = request_of(op);
  request.bytes = bytes;
  request.byte = byte;
  return request;
}
Request open_handle(const Reply& exported) {
  Request request = request_of(Op::kOpen);
  request.handle = exported.handle;
  return request;
}
Request at(Op op, uint64_t pointer, uint64_t bytes = 0, uint32_t byte = 0) {
  Request request = allocate(op, bytes, byte);
  request.pointer = pointer;
  return request;
}
Request import(uint64_t bytes, bool writable) {
  Request request = allocate(Op::kImport, bytes, 0);
  request.writable = writable ? 1 : 0;
  return request;
}

// "reads 0x5a" or the driver's error.
std::string read_text(Puppet& puppet, uint64_t pointer) {
  const Reply reply = puppet.ask(at(Op::kRead, pointer));
  if (reply.failed != 0) return std::string("reading fails (") + reply.text + ")";
  char text[32];
  snprintf(text, sizeof text, "reads 0x%02x", reply.byte & 0xff);
  return text;
}

std::string outcome(const Reply& reply, const char* success) {
  return reply.failed != 0 ? std::string("refused (") + reply.text + ")" : success;
}

// ---- the steps: each answers one question of docs/gpu.md ----

std::string opened_by_another_process() {
  Puppet exporter, importer;
  const Reply exported = exporter.must(allocate(Op::kAllocate, 2 * kMiB, 0x5a));
  const Reply opened = importer.ask(open_handle(exported));
  if (opened.failed != 0) return outcome(opened, "");
  return "opened, " + read_text(importer, opened.pointer) + " where 0x5a was written";
}

std::string written_by_the_importer() {
  Puppet exporter, importer;
  const Reply exported = exporter.must(allocate(Op::kAllocate, 2 * kMiB, 0x5a));
  const Reply opened = importer.must(open_handle(exported));
  const Reply written = importer.ask(at(Op::kFill, opened.pointer, 2 * kMiB, 0xa5));
  return outcome(written, "written") + ", the exporter " + read_text(exporter, exported.pointer);
}

std::string freed_text(int64_t bytes) {
  return std::to_string(bytes / static_cast<int64_t>(kMiB)) + " MiB";
}

std::string exporter_killed_while_held() {
  Puppet exporter, importer, observer;
  const Reply exported = exporter.must(allocate(Op::kAllocate, kLargeBytes, 0x5a));
  const Reply opened = importer.must(open_handle(exported));
  exporter.kill_now();
  std::string answer = "the importer then " + read_text(importer, opened.pointer);
  const uint64_t free_before = observer.must(request_of(Op::kFreeBytes)).bytes;
  answer += ", closing " + outcome(importer.ask(at(Op::kClose, opened.pointer)), "works");
  const uint64_t free_after = observer.must(request_of(Op::kFreeBytes)).bytes;
  return answer + ", which frees " + freed_text(static_cast<int64_t>(free_after - free_before)) +
         " of 512 MiB";
}

std::string opened_after_the_exporter_died() {
  Puppet exporter, importer;
  const Reply exported = exporter.must(allocate(Op::kAllocate, 2 * kMiB, 0x5a));
  exporter.kill_now();
  const Reply opened = importer.ask(open_handle(exported));
  return opened.failed != 0 ? outcome(opened, "")
                            : "opened, " + read_text(importer, opened.pointer);
}

std::string opened_twice_in_one_process() {
  Puppet exporter, importer;
  const Reply exported = exporter.must(allocate(Op::kAllocate, 2 * kMiB, 0x5a));
  const Reply first = importer.must(open_handle(exported));
  const Reply second = importer.ask(open_handle(exported));
  if (second.failed != 0) return "the second time " + outcome(second, "");
  std::string answer = second.pointer == first.pointer ? "the same pointer" : "another pointer";
  answer += ", closed once: " + outcome(importer.ask(at(Op::kClose, first.pointer)), "works");
  answer += ", then " + read_text(importer, second.pointer);
  return answer +
         ", closed again: " + outcome(importer.ask(at(Op::kClose, second.pointer)), "works");
}

std::string opened_by_another_user() {
  if (geteuid() != 0) throw Unavailable("only root can become another user");
  Puppet exporter, importer(kOtherUser);
  const Reply exported = exporter.must(allocate(Op::kAllocate, 2 * kMiB, 0x5a));
  importer.must(request_of(Op::kFreeBytes));  // that user can use the device at all
  const Reply opened = importer.ask(open_handle(exported));
  return opened.failed != 0 ? outcome(opened, "")
                            : "opened, " + read_text(importer, opened.pointer);
}

std::string opened_by_the_exporter() {
  Puppet exporter;
  const Reply exported = exporter.must(allocate(Op::kAllocate, 2 * kMiB, 0x5a));
  const Reply opened = exporter.ask(open_handle(exported));
  if (opened.failed != 0) return outcome(opened, "");
  return opened.pointer == exported.pointer ? "opened, the raw pointer" : "opened, another pointer";
}

// Two allocations in a row: do their handles differ, and does who opened one see the other?
std::string neighbours(uint64_t bytes) {
  Puppet exporter, importer;
  const Reply a = exporter.must(allocate(Op::kAllocate, bytes, 0x5a));
  const Reply b = exporter.must(allocate(Op::kAllocate, bytes, 0xb6));
  const auto distance = static_cast<int64_t>(b.pointer - a.pointer);
  std::string answer = "distance " + std::to_string(distance / static_cast<int64_t>(kKiB)) +
                       " KiB, handles " +
                       (memcmp(&a.handle, &b.handle, sizeof a.handle) == 0 ? "equal" : "differ");
  const Reply opened_a = importer.must(open_handle(a));
  answer += "; with the first open, the second's place " +
            read_text(importer, opened_a.pointer + static_cast<uint64_t>(distance)) +
            " (the second holds 0xb6)";
  const Reply opened_b = importer.ask(open_handle(b));
  if (opened_b.failed != 0) return answer + "; the second is " + outcome(opened_b, "");
  return answer + "; both open, distance " +
         std::to_string(static_cast<int64_t>(opened_b.pointer - opened_a.pointer) /
                        static_cast<int64_t>(kKiB)) +
         " KiB, the second " + read_text(importer, opened_b.pointer);
}
std::string neighbours_of_64_kib() {
  return neighbours(64 * kKiB);
}
std::string neighbours_of_2_mib() {
  return neighbours(2 * kMiB);
}

// cuMemCreate in `exporter`, its descriptor over SCM_RIGHTS to `importer`.
struct Passed {
  Reply created, imported;
};
Passed pass_descriptor(Puppet& exporter, Puppet& importer, uint64_t bytes, bool writable) {
  Passed passed;
  int fd = -1;
  passed.created = exporter.must(allocate(Op::kCreate, bytes, 0x5a), &fd);
  if (fd < 0) throw Unavailable("no descriptor came");
  try {
    passed.imported = importer.ask(import(passed.created.bytes, writable), fd);
  } catch (const Unavailable&) {
    close(fd);
    throw;
  }
  close(fd);
  return passed;
}

std::string descriptor_passed() {
  Puppet exporter, importer;
  const Passed passed = pass_descriptor(exporter, importer, 2 * kMiB, true);
  if (passed.imported.failed != 0) return outcome(passed.imported, "");
  return "mapped, " + read_text(importer, passed.imported.pointer) + " where 0x5a was written";
}

std::string descriptor_mapped_read_only() {
  Puppet exporter, importer;
  const Passed passed = pass_descriptor(exporter, importer, 2 * kMiB, false);
  if (passed.imported.failed != 0) return outcome(passed.imported, "");
  std::string answer = "mapped, " + read_text(importer, passed.imported.pointer);
  const Reply written = importer.ask(at(Op::kFill, passed.imported.pointer, 2 * kMiB, 0xa5));
  return answer + ", a write is " + outcome(written, "done") + ", the exporter " +
         read_text(exporter, passed.created.pointer);
}

std::string descriptor_of_a_killed_exporter() {
  Puppet exporter, importer;
  const Passed passed = pass_descriptor(exporter, importer, 2 * kMiB, true);
  if (passed.imported.failed != 0) return outcome(passed.imported, "");
  exporter.kill_now();
  return "the importer then " + read_text(importer, passed.imported.pointer);
}

std::string descriptor_passed_to_another_user() {
  if (geteuid() != 0) throw Unavailable("only root can become another user");
  Puppet exporter, importer(kOtherUser);
  importer.must(request_of(Op::kFreeBytes));
  const Passed passed = pass_descriptor(exporter, importer, 2 * kMiB, true);
  if (passed.imported.failed != 0) return outcome(passed.imported, "");
  return "mapped, " + read_text(importer, passed.imported.pointer);
}

struct Step {
  const char* question;
  std::string (*run)();
};
constexpr Step kSteps[] = {
    {"IPC handle, opened by another process", opened_by_another_process},
    {"IPC handle, written by the importer", written_by_the_importer},
    {"IPC handle, exporter killed while it is held", exporter_killed_while_held},
    {"IPC handle, opened after the exporter died", opened_after_the_exporter_died},
    {"IPC handle, opened twice in one process", opened_twice_in_one_process},
    {"IPC handle, opened by another user", opened_by_another_user},
    {"IPC handle, opened by the exporter itself", opened_by_the_exporter},
    {"IPC handles, two allocations of 64 KiB", neighbours_of_64_kib},
    {"IPC handles, two allocations of 2 MiB", neighbours_of_2_mib},
    {"cuMemCreate descriptor over SCM_RIGHTS", descriptor_passed},
    {"cuMemCreate descriptor, mapped read-only", descriptor_mapped_read_only},
    {"cuMemCreate descriptor, exporter killed", descriptor_of_a_killed_exporter},
    {"cuMemCreate descriptor, to another user", descriptor_passed_to_another_user},
};

int run_coordinator() {
  total_deadline = Clock::now() + std::chrono::milliseconds(kTotalTimeoutMs);
  step_deadline = Clock::now() + std::chrono::milliseconds(kStepTimeoutMs);
  try {
    Puppet puppet;
    const Reply device = puppet.ask(request_of(Op::kDevice));
    if (device.failed != 0) {
      printf("gpu-probe: unavailable: no CUDA device can be used: %s\n", device.text);
      return 77;
    }
    printf("%s\n\n", device.text);
  } catch (const Unavailable& error) {
    printf("gpu-probe: unavailable: %s\n", error.what());
    return 77;
  }
  printf("%-46s %s\n", "question", "what happened");
  printf("%.46s %.60s\n", "----------------------------------------------",
         "------------------------------------------------------------");
  for (const Step& step : kSteps) {
    std::string answer;
    step_deadline =
        std::min(total_deadline, Clock::now() + std::chrono::milliseconds(kStepTimeoutMs));
    try {
      if (Clock::now() >= total_deadline) throw Unavailable("the probe's time is up");
      answer = step.run();
    } catch (const Unavailable& error) {
      answer = std::string("unavailable: ") + error.what();
    }
    printf("%-46s %s\n", step.question, answer.c_str());
    fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && strcmp(argv[1], "puppet") == 0)
    return run_puppet(static_cast<unsigned>(strtoul(argv[2], nullptr, 10)));
  return run_coordinator();
}
