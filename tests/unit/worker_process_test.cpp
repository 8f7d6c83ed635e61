#include "daemon/worker_process.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <string>

#include "common/packet_socket.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::daemon;

namespace {

/// A program of one line of shell, removed again.
class Script {
 public:
  explicit Script(const std::string& line) {
    char path[] = "/tmp/polykv-test-XXXXXX";
    const UniqueFd file(::mkstemp(path));
    REQUIRE(file);
    path_ = path;
    const std::string text = "#!/bin/sh\n" + line + "\n";
    REQUIRE(::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    REQUIRE(::fchmod(file.get(), 0700) == 0);
  }
  ~Script() { ::unlink(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

WorkerProcess::Started start(const std::string& program) {
  auto started = WorkerProcess::start(program);
  REQUIRE_OK(started);
  return std::move(*started);
}

}  // namespace

TEST_CASE("a worker's end is told with its exit status") {
  auto good = start("/bin/true");
  CHECK(good.process.reap() == "exited with status 0");
  auto bad = start("/bin/false");
  CHECK(bad.process.reap() == "exited with status 1");
}

TEST_CASE("a worker's end is told with the signal that killed it") {
  const Script script("kill -SEGV $$");
  auto started = start(script.path());
  CHECK(started.process.reap() == "was killed by signal 11 (Segmentation fault)");
}

TEST_CASE("a stopped worker can be killed, and its pidfd tells") {
  const Script script("kill -STOP $$");
  auto started = start(script.path());
  pollfd entry{started.process.pidfd(), POLLIN, 0};
  CHECK(::poll(&entry, 1, 0) == 0);
  started.process.kill();
  REQUIRE(::poll(&entry, 1, -1) == 1);
  CHECK(started.process.reap() == "was killed by signal 9 (Killed)");
}

TEST_CASE("a worker has its socket as descriptor 3 and no other descriptor") {
  const UniqueFd inherited(::dup(STDERR_FILENO));  // without CLOEXEC
  REQUIRE(inherited);
  // 10 is the shell's own script. A name that is gone again was the folder itself, being listed.
  const Script script(
      "test -S /proc/self/fd/3 || exit 8; "
      "for fd in /proc/$$/fd/*; do case ${fd##*/} in [0123]|10) ;; "
      "*) test -e $fd && exit 9 ;; esac; done; exit 0");
  auto started = start(script.path());
  CHECK(started.process.reap() == "exited with status 0");
}

TEST_CASE("what a worker writes to its socket arrives") {
  const Script script("printf hello >&3");
  auto started = start(script.path());
  ReceivedPacket packet;
  const auto received = packet_receive(started.socket.get(), packet);
  REQUIRE_OK(received);
  CHECK(std::string(packet.bytes.begin(), packet.bytes.end()) == "hello");
  CHECK(started.process.reap() == "exited with status 0");
}

TEST_CASE("a program that is not there is an error that names it") {
  const auto started = WorkerProcess::start("/nonexistent/polykv-prefill");
  CHECK(started.status().code() == POLYKV_ERR_WORKER);
  CHECK(started.status().message().find("/nonexistent/polykv-prefill") != std::string::npos);
}

TEST_CASE("the worker program is the configured one, else it is looked for beside this program") {
  CHECK(*find_worker_program("/some/where") == "/some/where");
  const auto found = find_worker_program("");
  CHECK(found.status().code() == POLYKV_ERR_WORKER);  // tests have a folder of their own
  CHECK(found.status().message().find("/polykv-prefill") != std::string::npos);
}
