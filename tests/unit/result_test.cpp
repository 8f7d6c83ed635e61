#include "common/result.h"
#include "tests/support/require_ok.h"

#include <catch2/catch.hpp>

using namespace polykv;

TEST_CASE("a Status carries its code, name and message") {
  const Status status(POLYKV_ERR_BUSY, "acquire 'a': busy");
  CHECK(!status.is_ok());
  CHECK(std::string(status_name(status.code())) == "POLYKV_ERR_BUSY");
  CHECK(status.with_context("put").message() == "put: acquire 'a': busy");
  CHECK(status.with_context("put").code() == POLYKV_ERR_BUSY);
  CHECK_OK(Status::ok().with_context("put"));
}

TEST_CASE("POLYKV_ASSIGN_OR_RETURN passes values on and errors up") {
  const auto half = [](int n) -> Result<int> {
    if (n % 2 != 0) return {POLYKV_ERR_INVALID_ARGUMENT, format("half of %d", n)};
    return n / 2;
  };
  const auto quarter = [&](int n) -> Result<int> {
    POLYKV_ASSIGN_OR_RETURN(const int h, half(n));
    return half(h);
  };
  CHECK(*quarter(8) == 2);
  CHECK(quarter(6).status().message() == "half of 3");
}
