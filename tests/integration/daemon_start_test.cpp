// Starting and stopping: who owns the socket, and what the daemon refuses to start with.
#include <sys/file.h>

#include <catch2/catch.hpp>

#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

UniqueFd listen_on(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  REQUIRE(bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(listen(socket.get(), 16) == 0);
  return socket;
}

}  // namespace

TEST_CASE("the second of two daemons on one socket exits before it touches it") {
  DaemonProcess daemon;
  RawClient before(daemon.socket_path());
  const DaemonRun second = run_daemon({"--socket", daemon.socket_path()});
  CHECK(!second.status.was_killed);
  CHECK(second.status.code == POLYKV_ERR_ALREADY_EXISTS);
  CHECK(contains(second.output, "another polykvd (pid " + std::to_string(daemon.pid()) + ")"));
  CHECK(before.status().code() == POLYKV_OK);
  CHECK(RawClient(daemon.socket_path()).status().code() == POLYKV_OK);
}

TEST_CASE("the socket that a killed daemon left behind is taken over") {
  DaemonProcess daemon;
  daemon.kill();
  REQUIRE(std::filesystem::exists(daemon.socket_path()));
  daemon.restart();
  CHECK(RawClient(daemon.socket_path()).status().code() == POLYKV_OK);
}

TEST_CASE("a graceful stop hangs up, exits with 0 and leaves no file") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  for (const int number : {SIGTERM, SIGINT}) {
    daemon.signal(number);
    const ExitStatus status = daemon.wait();
    CHECK(!status.was_killed);
    CHECK(status.code == 0);
    CHECK(!std::filesystem::exists(daemon.socket_path()));
    CHECK(!std::filesystem::exists(daemon.socket_path() + ".lock"));
    daemon.restart();
  }
  CHECK(client.is_closed_by_daemon());
}

TEST_CASE("a socket that somebody else serves, and a file that is no socket, are left alone") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/other.sock";
  SECTION("somebody accepts connections there without our lock") {
    const UniqueFd other = listen_on(path);
    const DaemonRun run = run_daemon({"--socket", path});
    CHECK(run.status.code == POLYKV_ERR_ALREADY_EXISTS);
    CHECK(contains(run.output, "somebody accepts connections there"));
    CHECK_OK(packet_connect(path));
  }
  SECTION("a regular file") {
    folder.write("other.sock", "precious");
    const DaemonRun run = run_daemon({"--socket", path});
    CHECK(run.status.code == POLYKV_ERR_ALREADY_EXISTS);
    CHECK(contains(run.output, "no socket"));
    CHECK(std::filesystem::file_size(path) == 8);
  }
  CHECK(!std::filesystem::exists(path + ".lock"));
}

TEST_CASE("the service manager's socket is used and not removed") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/activated.sock";
  const UniqueFd listening = listen_on(path);
  ChildProcess daemon([&](const Channel&) {
    dup2(listening.get(), 3);
    fcntl(3, F_SETFD, 0);  // it may have been 3 all along
    setenv("LISTEN_FDS", "1", 1);
    setenv("LISTEN_PID", std::to_string(getpid()).c_str(), 1);
    unsetenv("NOTIFY_SOCKET");
    execl(POLYKV_DAEMON_PATH, POLYKV_DAEMON_PATH, "--log-level", "off", nullptr);
  });
  RawClient client(path);
  const Reply status = client.status();
  CHECK(status.as<wire::StatusReply>().pid() == daemon.pid());
  daemon.signal(SIGTERM);
  CHECK(daemon.succeeds());
  CHECK(std::filesystem::exists(path));
}

TEST_CASE("errors of the configuration end the start with one line") {
  const TemporaryFolder folder;
  const std::string config = folder.write("polykvd.toml", "budget = \"1GiB\"\nbudgte = \"2GiB\"\n");
  const DaemonRun run = run_daemon({"--config", config, "--check-config"});
  CHECK(run.status.code == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(contains(run.output, config + ", line 2, key 'budgte'"));
  CHECK(std::count(run.output.begin(), run.output.end(), '\n') == 1);
  CHECK(run_daemon({"--bogus"}).status.code == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(run_daemon({"--socket", "relative"}).status.code == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(run_daemon({"--socket", folder.path() + "/no/such/folder/s"}).status.code ==
        POLYKV_ERR_SYSTEM);
  CHECK(run_daemon({"--socket", "/" + std::string(200, 'x')}).status.code != 0);
}

TEST_CASE("--check-config, --version and --help end well without a socket") {
  const TemporaryFolder folder;
  const std::string config =
      folder.write("polykvd.toml", "budget = \"1GiB\"\n[models]\nsmall = \"/models/small.gguf\"\n");
  const DaemonRun run = run_daemon({"--config", config, "--check-config"});
  CHECK(run.status.code == 0);
  CHECK(contains(run.output, "budget 1073741824 bytes, 1 models"));
  CHECK(contains(run_daemon({"--version"}).output, "polykvd "));
  CHECK(contains(run_daemon({"--help"}).output, "--stall-deadline"));
}
