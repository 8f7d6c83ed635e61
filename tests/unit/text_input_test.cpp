#include "daemon/prefill/worker/text_input.h"

#include <fcntl.h>
#include <unistd.h>

#include <catch2/catch.hpp>

#include "common/fd.h"
#include "tests/support/require_ok.h"
#include "tests/support/text_file.h"

using namespace polykv;
using namespace polykv::test;

TEST_CASE("a file is read from its start wherever its position is, and the position stays") {
  const std::string text(1'000'000, 'x');
  const UniqueFd file = text_file(text);
  REQUIRE(::lseek(file.get(), 17, SEEK_SET) == 17);
  auto read = read_text(file.get(), "the text", {});
  REQUIRE_OK(read);
  CHECK(*read == text);
  CHECK(::lseek(file.get(), 0, SEEK_CUR) == 17);
}

TEST_CASE("a pipe is read to its end") {
  const UniqueFd reader = text_pipe("hello");
  auto read = read_text(reader.get(), "the text", {});
  REQUIRE_OK(read);
  CHECK(*read == "hello");
}

TEST_CASE("a text longer than the limit is refused, one of exactly the limit is read") {
  const UniqueFd file = text_file(std::string(1000, 'x'));
  TextLimits limits;
  limits.max_bytes = 999;
  CHECK(read_text(file.get(), "the text", limits).status().code() == POLYKV_ERR_LIMIT);
  limits.max_bytes = 1000;
  CHECK_OK(read_text(file.get(), "the text", limits));
}

TEST_CASE("a pipe whose writer says nothing ends with the deadline") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const UniqueFd reader(ends[0]), writer(ends[1]);
  TextLimits limits;
  limits.deadline_ms = 20;
  CHECK(read_text(reader.get(), "the text", limits).status().code() == POLYKV_ERR_TIMEOUT);
}

TEST_CASE("reading a text can be cancelled") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const UniqueFd reader(ends[0]), writer(ends[1]);
  CHECK(read_text(reader.get(), "the text", {}, [] { return false; }).status().code() ==
        POLYKV_ERR_CANCELLED);
}

TEST_CASE("directories and devices are no text") {
  const UniqueFd directory(::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  CHECK(read_text(directory.get(), "the text", {}).status().code() == POLYKV_ERR_INVALID_ARGUMENT);
  const UniqueFd device(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  CHECK(read_text(device.get(), "the text", {}).status().code() == POLYKV_ERR_INVALID_ARGUMENT);
}

TEST_CASE("a descriptor that cannot be read gives an error that names the text") {
  const UniqueFd file(::open("/tmp", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600));
  REQUIRE(file);
  const auto read = read_text(file.get(), "the text", {});
  CHECK(read.status().code() == POLYKV_ERR_SYSTEM);
  CHECK(read.status().message().find("the text") != std::string::npos);
}
