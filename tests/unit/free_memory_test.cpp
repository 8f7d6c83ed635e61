#include "daemon/prefill/worker/free_memory.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <string>

#include "common/memfd.h"
#include "tests/support/require_ok.h"

using namespace polykv;

namespace {

Result<uint64_t> available_in(const std::string& text) {
  auto file = memfd_create_sealable("polykv-test");
  REQUIRE_OK(file);
  REQUIRE(::write(file->get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  return FreeMemory(std::move(*file)).available_bytes();
}

}  // namespace

TEST_CASE("available memory is what MemAvailable says, in bytes") {
  const auto bytes = available_in("MemTotal:  100 kB\nMemFree:  1 kB\nMemAvailable:   42 kB\n");
  REQUIRE_OK(bytes);
  CHECK(*bytes == 42 * 1024);
}

TEST_CASE("a machine that does not tell its available memory is an error") {
  CHECK_FALSE(available_in("MemTotal:  100 kB\n").is_ok());
  CHECK_FALSE(available_in("MemAvailable:").is_ok());
  CHECK_FALSE(available_in("MemAvailable: many kB\n").is_ok());
  CHECK_FALSE(available_in("").is_ok());
}

TEST_CASE("this machine tells its available memory, every time it is asked") {
  const auto memory = FreeMemory::open();
  REQUIRE_OK(memory);
  for (int i = 0; i < 3; ++i) {
    const auto bytes = memory->available_bytes();
    REQUIRE_OK(bytes);
    CHECK(*bytes > 0);
  }
}
