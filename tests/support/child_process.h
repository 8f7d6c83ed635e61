// A forked child that runs a piece of the test in a process of its own, in step with the parent.
// Fork before the test starts threads. Ended by its own PID with the test.
#pragma once

#include <linux/sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>

#include "common/fd.h"
#include "tests/support/daemon_process.h"

namespace polykv::test {

/// Either end: say() hands a word over, hear() waits for one. The other end's death is an error.
class Channel {
 public:
  explicit Channel(int fd) : fd_(fd) {}
  void say(const std::string& word) const {
    if (::send(fd_, word.data(), word.size(), MSG_NOSIGNAL) < 0)
      throw std::runtime_error("the other process is gone");
  }
  std::string hear() const {
    char text[256];
    const ssize_t length = ::recv(fd_, text, sizeof text, 0);
    if (length <= 0) throw std::runtime_error("the other process is gone");
    return {text, static_cast<size_t>(length)};
  }

 private:
  int fd_;
};

/// fork(), but the child gets a PID that was used before and is free now. -1 with EPERM where the
/// test may not choose a PID (CAP_CHECKPOINT_RESTORE).
inline pid_t fork_with_pid(pid_t pid) {
  clone_args arguments{};
  arguments.exit_signal = SIGCHLD;
  arguments.set_tid = reinterpret_cast<uintptr_t>(&pid);
  arguments.set_tid_size = 1;
  return static_cast<pid_t>(::syscall(SYS_clone3, &arguments, sizeof arguments));
}

class ChildProcess {
 public:
  /// body(channel) runs in the child, which then exits with 0, or with 1 after an exception.
  /// pid: see fork_with_pid(); 0 leaves it to the kernel.
  template <typename Body>
  explicit ChildProcess(Body body, pid_t pid = 0) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
      throw std::runtime_error("cannot make a socket pair");
    mine_ = UniqueFd(ends[0]);
    UniqueFd theirs(ends[1]);
    pid_ = pid == 0 ? ::fork() : fork_with_pid(pid);
    if (pid_ < 0) throw std::runtime_error("cannot fork");
    if (pid_ > 0) return;
    mine_.reset();
    int code = 0;
    try {
      body(Channel(theirs.get()));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child process: %s\n", error.what());
      code = 1;
    }
    ::_exit(code);
  }
  ~ChildProcess() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  Channel channel() const { return Channel(mine_.get()); }
  std::string hear() const { return channel().hear(); }
  void say(const std::string& word) const { channel().say(word); }
  void signal(int number) const { ::kill(pid_, number); }

  ExitStatus wait() {
    const ExitStatus status = wait_for_exit(pid_);
    pid_ = -1;
    return status;
  }
  ExitStatus kill() {
    signal(SIGKILL);
    return wait();
  }
  /// Whether it ends by itself and well.
  bool succeeds() {
    const ExitStatus status = wait();
    return !status.was_killed && status.code == 0;
  }

 private:
  UniqueFd mine_;
  pid_t pid_ = -1;
};

/// Memory of a child's own, in many pieces: some lie where its parent has what the child did not get.
class OwnMemory {
 public:
  OwnMemory() {
    for (std::span<uint8_t>& piece : pieces_) {
      void* memory = ::mmap(nullptr, kPieceBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
      if (memory == MAP_FAILED) throw std::runtime_error("no memory");
      piece = {static_cast<uint8_t*>(memory), kPieceBytes};
    }
  }
  /// Ends the process where a piece is gone.
  void write() const {
    for (const std::span<uint8_t>& piece : pieces_) std::ranges::fill(piece, uint8_t{1});
  }

 private:
  static constexpr size_t kPieceBytes = size_t{1} << 16;
  std::array<std::span<uint8_t>, 256> pieces_;
};

}  // namespace polykv::test
