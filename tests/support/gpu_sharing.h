// Whether processes of this machine can share a GPU's memory, for tests on a real one: WSL2, MIG and containers refuse, and then
// there is nothing to test but that polykvd says so, which the emulation does.
#pragma once

#include <stdexcept>
#include <string>

#include "polykv/polykv.hpp"
#include "tests/support/daemon_process.h"

namespace polykv::test {

/// What polykvd finds at its start, by a real export and import; empty: they can. Throws where polykvd cannot be asked.
inline std::string why_memory_is_not_shared(const std::string& cuda_library) {
  const DaemonProcess daemon(
      {"--backing", "auto", "--cuda-library", cuda_library, "--cuda-reserve", "0"});
  client::ConnectOptions options;
  options.socket_path = daemon.socket_path().c_str();
  auto session = client::Session::connect(options);
  if (!session.ok()) throw std::runtime_error(session.error().message);
  const auto status = session->daemon_status();
  if (!status.ok()) throw std::runtime_error(status.error().message);
  if (status->backing == std::string("cuda")) return "";
  return status->backing_note;
}

}  // namespace polykv::test
