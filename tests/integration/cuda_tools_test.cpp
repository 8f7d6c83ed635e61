// What polykvctl tells of documents in device memory and of the GPU; on an emulated one.
#include <catch2/catch.hpp>

#include "tests/support/cuda_bench.h"
#include "tests/support/run_program.h"

using namespace polykv;
using namespace polykv::test;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// polykvctl, as somebody in front of this machine and its emulated GPU.
ProgramRun ctl(const std::string& socket_path, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"--socket", socket_path});
  // A copy: doctor starts the polykv-prefill beside it, which takes two seconds and is polykvctl_test's subject.
  static const TemporaryFolder folder;
  static const std::string program = folder.path() + "/polykvctl";
  std::filesystem::copy_file(POLYKV_CTL_PATH, program,
                             std::filesystem::copy_options::skip_existing);
  return run_program(program, arguments);
}

}  // namespace

TEST_CASE("ls, show and status tell that documents are in the memory of a GPU, and of which") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags({"--cuda-reserve", "64MiB"}));
  client::Session session = connect_to(daemon.socket_path());
  const client::Lease lease = SyntheticDocument(300).publish(session, "a");
  const ProgramRun listed = ctl(daemon.socket_path(), {"ls"});
  CHECK(contains(listed.output, "sealed,gpu"));
  const ProgramRun shown = ctl(daemon.socket_path(), {"show", "a"});
  CHECK(contains(shown.output, "of a GPU"));
  const ProgramRun status = ctl(daemon.socket_path(), {"status"});
  INFO(status.output);
  CHECK(contains(status.output, "Emulated GPU 0 (GPU-e0000000-0000-0000-0000-000000000001)"));
  CHECK(contains(status.output, "64.0 MiB of it for other programs"));
  CHECK(contains(status.output, "CUDA 13.0"));
  const ProgramRun json = ctl(daemon.socket_path(), {"status", "--json"});
  CHECK(contains(json.output, "\"backing\": \"cuda\""));
}

TEST_CASE("row 36: polykvctl verify recomputes what is in device memory now") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  client::Session session = connect_to(daemon.socket_path());
  { const client::Lease lease = SyntheticDocument(300).publish(session, "a"); }
  const uint64_t segment = bench.device().state()->next_id - 1;
  CHECK(ctl(daemon.socket_path(), {"verify", "a"}).exit_code == 0);
  bench.device().damage(segment, 0);
  const ProgramRun verified = ctl(daemon.socket_path(), {"verify", "a"});
  INFO(verified.errors);
  CHECK(verified.exit_code == POLYKV_ERR_CORRUPT);
  CHECK(contains(verified.errors, "segment 0: layer 0"));
}

TEST_CASE("doctor tells the GPUs, their memory, the versions, and whether they share memory") {
  const CudaBench bench;
  const DaemonProcess daemon(bench.device().flags());
  const auto doctor = [&] { return ctl(daemon.socket_path(), {"doctor"}); };
  const ProgramRun good = doctor();
  INFO(good.output);
  CHECK(contains(good.output, "GPU-e0000000-0000-0000-0000-000000000001 Emulated GPU 0, "));
  CHECK(contains(good.output, "GPU-e0000000-0000-0000-0000-000000000002 Emulated GPU 1, "));
  CHECK(contains(good.output, "1.0 GiB of 1.0 GiB free, driver for CUDA 13.0, runtime 13.0"));
  CHECK(contains(good.output, "another process opened and wrote its memory"));
  CHECK(contains(good.output, "backing"));

  bench.device().set_faults("open_fails");
  const ProgramRun unshared = doctor();
  CHECK(contains(unshared.output, "mapping of buffer object failed"));
  CHECK(contains(unshared.output, "WSL2"));
  bench.device().set_faults("no_driver");
  CHECK(contains(doctor().output, "no NVIDIA driver"));
}

TEST_CASE("doctor says why documents are in host memory although a GPU was asked for") {
  const CudaBench bench;
  bench.device().set_faults("ipc_unsupported");
  const DaemonProcess daemon(bench.device().flags({}, "auto"));
  const ProgramRun run = ctl(daemon.socket_path(), {"doctor"});
  INFO(run.output);
  CHECK(contains(run.output, "host memory, because: keep documents in GPU memory"));
  CHECK(contains(ctl(daemon.socket_path(), {"status"}).output, "host memory, because:"));
}
