#include <catch2/catch.hpp>

#include "tests/integration/c_abi_test.h"
#include "tests/support/daemon_process.h"

using namespace polykv::test;

TEST_CASE("every function of the C ABI works from C, on the shared library, against polykvd") {
  const DaemonProcess daemon;
  CHECK(c_abi_test(daemon.socket_path().c_str(), TestDevice::is_wanted() ? 1 : 0) == 0);
}
