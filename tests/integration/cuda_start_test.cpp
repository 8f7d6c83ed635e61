// What polykvd does at its start with the GPU that it finds, or does not find. Numbers are rows of the
// failure checklist.
#include <sys/prctl.h>

#include <catch2/catch.hpp>
#include <thread>

#include "device/probe.h"
#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"

using namespace polykv;
using namespace polykv::test;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// polykvd run to its end on an emulated GPU.
DaemonRun refused_start(const EmulatedDevice& device, std::vector<std::string> more = {}) {
  device.use_here();
  const TemporaryFolder folder;
  more.insert(more.end(), {"--socket", folder.path() + "/socket"});
  return run_daemon(device.flags(std::move(more)));
}

}  // namespace

TEST_CASE("row 23: where memory cannot be shared, polykvd refuses to start and names the cause") {
  const auto [fault, drivers_words] =
      GENERATE(std::pair("ipc_unsupported", "export device memory: operation not supported"),
               std::pair("open_fails", "open device memory: mapping of buffer object failed"));
  const EmulatedDevice device;
  device.set_faults(fault);
  const DaemonRun run = refused_start(device);
  INFO(run.output);
  CHECK(run.status.code == POLYKV_ERR_UNSUPPORTED);
  CHECK(contains(run.output, "with another process"));
  CHECK(contains(run.output, drivers_words));
  CHECK(contains(run.output, "WSL2"));
  CHECK(contains(run.output, "MIG"));
  CHECK(contains(run.output, "PID namespace"));
  CHECK(contains(run.output, "different users"));
  CHECK(contains(run.output, "--backing memfd"));
  CHECK(device.violations() == "");
}

TEST_CASE("row 23: with --backing auto it keeps documents in host memory and says why") {
  const EmulatedDevice device;
  device.set_faults("ipc_unsupported");
  const DaemonProcess daemon(device.flags({}, "auto"), device.environment());
  RawClient client(daemon.socket_path());
  const Reply reply = client.status();
  const auto& status = reply.as<wire::StatusReply>();
  CHECK(text_or_empty(status.backing()) == "memfd");
  CHECK(contains(std::string(text_or_empty(status.backing_note())), "operation not supported"));
  CHECK(contains(daemon.log(), "host memory"));
  client.publish(TestDocument(), "a");
  CHECK(client.lease("a").fds.size() == 1);
  CHECK(device.state()->live_count() == 0);
}

TEST_CASE("the probe leaves nothing behind, and auto takes a GPU that works") {
  const EmulatedDevice device;
  const DaemonProcess daemon(device.flags({}, "auto"), device.environment());
  RawClient client(daemon.socket_path());
  const Reply reply = client.status();
  CHECK(text_or_empty(reply.as<wire::StatusReply>().backing()) == "cuda");
  const auto state = device.state();
  CHECK(state->allocated_total == 1);  // the probe's
  CHECK(state->open_total == 1);       // by a process of its own: the exporter cannot
  CHECK(state->live_count() == 0);
  CHECK(device.violations() == "");
}

TEST_CASE("row 33: a daemon that starts before the driver waits for it and says so") {
  const EmulatedDevice device;
  device.set_faults("no_driver");
  std::thread driver([&] {
    while (device.state()->missing_total == 0) std::this_thread::yield();
    device.set_faults("");
  });
  const DaemonProcess daemon(device.flags(), device.environment());
  driver.join();
  CHECK(contains(daemon.log(), "waiting for the GPU: count GPUs: no CUDA-capable device"));
  CHECK(
      contains(daemon.notifications(), "STATUS=Waiting for the GPU: count GPUs: no CUDA-capable"));
  CHECK(contains(daemon.notifications(), "EXTEND_TIMEOUT_USEC="));
  RawClient client(daemon.socket_path());
  const Reply reply = client.status();
  CHECK(text_or_empty(reply.as<wire::StatusReply>().backing()) == "cuda");
}

TEST_CASE("row 33: a daemon that waits for the driver can be told to stop") {
  const EmulatedDevice device;
  device.set_faults("no_driver");
  device.use_here();
  const TemporaryFolder folder;
  ChildProcess daemon([&](const Channel&) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::unsetenv("NOTIFY_SOCKET");
    const std::string socket = folder.path() + "/socket";
    ::execl(POLYKV_DAEMON_PATH, POLYKV_DAEMON_PATH, "--backing", "cuda", "--cuda-library",
            POLYKV_EMULATED_LIBRARY, "--cuda-wait", "600s", "--socket", socket.c_str(), nullptr);
    throw std::runtime_error("polykvd cannot be started");
  });
  while (device.state()->missing_total == 0) std::this_thread::yield();
  daemon.signal(SIGTERM);
  CHECK(daemon.succeeds());
}

TEST_CASE("row 33: it does not wait for ever") {
  const EmulatedDevice device;
  device.set_faults("no_driver");
  const DaemonRun run = refused_start(device, {"--cuda-wait", "1ms"});
  INFO(run.output);
  CHECK(run.status.code == POLYKV_ERR_UNSUPPORTED);
  CHECK(contains(run.output, "no CUDA-capable device"));
}

TEST_CASE("a GPU that is not there, and a library that is not there, are named") {
  const EmulatedDevice device;
  const DaemonRun other = refused_start(
      device, {"--cuda-device", "GPU-00000000-0000-0000-0000-000000000009", "--cuda-wait", "1ms"});
  INFO(other.output);
  CHECK(other.status.code == POLYKV_ERR_WRONG_DEVICE);
  CHECK(contains(other.output, "GPU-00000000-0000-0000-0000-000000000009"));
  CHECK(contains(other.output, "GPU-e0000000-0000-0000-0000-000000000001"));
  const DaemonRun missing = refused_start(device, {"--cuda-library", "/nowhere/libpolykv_cuda.so"});
  INFO(missing.output);
  CHECK(missing.status.code == POLYKV_ERR_UNSUPPORTED);
  CHECK(contains(missing.output, "/nowhere/libpolykv_cuda.so"));
}

TEST_CASE("causes of a failure: what is seen here comes first, what is known elsewhere follows") {
  using device::causes_of_failure;
  const std::string wsl =
      causes_of_failure({"Linux version 5.15-microsoft-standard-WSL2", "A", {}});
  CHECK(contains(wsl, "this looks like WSL2;"));
  const std::string mig = causes_of_failure({"Linux", "NVIDIA H200 MIG 1g.18gb", true});
  CHECK(contains(mig, "this looks like a MIG instance, a container"));
  CHECK(contains(mig, "known not to allow it: WSL2, processes of different users"));
  CHECK(!contains(causes_of_failure({"Linux", "NVIDIA H200", false}), "this looks like"));
}
