#include "daemon/fingerprint_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>

#include "common/memfd.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::daemon;

namespace {

ModelKey key_of(uint32_t uid, uint64_t inode) {
  ModelKey key;
  key.uid = uid;
  key.file.inode = inode;
  return key;
}

ModelIdentity identity_of(uint8_t number) {
  ModelIdentity identity;
  identity.fingerprint[0] = number;
  return identity;
}

}  // namespace

TEST_CASE("a file that was seen is known to the same user alone") {
  FingerprintCache cache;
  cache.insert(key_of(1, 10), identity_of(7));
  REQUIRE(cache.find(key_of(1, 10)) != nullptr);
  CHECK(cache.find(key_of(1, 10))->fingerprint[0] == 7);
  CHECK(cache.find(key_of(2, 10)) == nullptr);
  CHECK(cache.find(key_of(1, 11)) == nullptr);
}

TEST_CASE("a full cache forgets what was used least recently") {
  FingerprintCache cache(2);
  cache.insert(key_of(1, 1), identity_of(1));
  cache.insert(key_of(1, 2), identity_of(2));
  REQUIRE(cache.find(key_of(1, 1)) != nullptr);
  cache.insert(key_of(1, 3), identity_of(3));
  CHECK(cache.find(key_of(1, 1)) != nullptr);
  CHECK(cache.find(key_of(1, 2)) == nullptr);
  CHECK(cache.find(key_of(1, 3)) != nullptr);
}

TEST_CASE("a changed file has another identity, an unchanged one the same") {
  auto file = memfd_create_sealable("polykv-test");
  REQUIRE_OK(file);
  REQUIRE(::write(file->get(), "one", 3) == 3);
  const auto before = file_identity(file->get());
  REQUIRE_OK(before);
  CHECK(*file_identity(file->get()) == *before);
  SECTION("longer") {
    REQUIRE(::write(file->get(), "more", 4) == 4);
    CHECK(*file_identity(file->get()) != *before);
  }
  SECTION("with its modification time put back") {
    const timespec times[2] = {{0, UTIME_OMIT}, {1, 0}};
    REQUIRE(::futimens(file->get(), times) == 0);
    CHECK(*file_identity(file->get()) != *before);
  }
}

TEST_CASE("a pipe is no model file") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const UniqueFd reader(ends[0]), writer(ends[1]);
  CHECK(file_identity(reader.get()).status().code() == POLYKV_ERR_INVALID_ARGUMENT);
}
