// Seal, then verify: what a producer can do to a segment's memory, and what a reader cannot.
#include "daemon/segment_backing.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "common/mapping.h"
#include "tests/support/require_ok.h"
#include "tests/support/segments.h"

using namespace polykv;
using namespace polykv::daemon;
using namespace polykv::test;

namespace {

constexpr uint64_t kTokens = 300;

/// A reservation, and the bytes that an honest producer would write.
struct Reservation {
  SegmentPromise promise;
  UniqueFd memfd;
  std::vector<LayerValues> values;

  Reservation() {
    promise.spec = test_spec(test_model({{2, 64, 64, 0}}), Profile::k8v8, kTokens);
    promise.root = chain_root(promise.spec.identity);
    promise.parent = promise.root;
    promise.document_tokens = std::make_shared<const std::vector<uint32_t>>(test_ids(kTokens));
    promise.digests = chain_digests(promise.root, *promise.document_tokens);
    promise.size_bytes = *segment_size_bytes(promise.spec);
    auto allocated = allocate_segment(promise.size_bytes);
    REQUIRE_OK(allocated);
    memfd = std::move(*allocated);
    values.push_back(random_values(promise.spec.identity.layers[0], kTokens, 1));
  }

  Mapping map() const {
    auto mapping = Mapping::map(memfd.get(), promise.size_bytes, MapAccess::read_write);
    REQUIRE_OK(mapping);
    return std::move(*mapping);
  }
  void write(const SegmentSpec& spec, const Digest& parent,
             const std::vector<uint32_t>& tokens) const {
    Mapping mapping = map();
    const SegmentContents contents{tokens, parent, promise.digests, PrefixTreatment::none};
    auto writer = SegmentWriter::create(spec, contents, mapping.writable_bytes());
    REQUIRE_OK(writer);
    REQUIRE_OK(writer->encode_layer(0, values[0].source()));
    REQUIRE_OK(writer->finish());
  }
  void write_honestly() const { write(promise.spec, promise.parent, *promise.document_tokens); }

  Status commit() const { return seal_and_verify(memfd.get(), promise).status(); }
};

}  // namespace

TEST_CASE("an honest segment is sealed and comes back read-only") {
  const Reservation reservation;
  reservation.write_honestly();
  const auto readable = seal_and_verify(reservation.memfd.get(), reservation.promise);
  INFO(readable.status().message());
  REQUIRE_OK(readable);
  const int fd = readable->readable.get();
  CHECK((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY);
  struct stat info;
  REQUIRE(fstat(fd, &info) == 0);
  CHECK((info.st_mode & 0777) == 0400);
  constexpr int kAll = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
  CHECK((fcntl(fd, F_GET_SEALS) & kAll) == kAll);
}

TEST_CASE(
    "a sealed segment tells its layers' profiles and certificates, and none that is no number") {
  for (const float error : {0.25F, 0.0F, std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity(), -0.5F}) {
    Reservation reservation;
    SegmentPromise& promise = reservation.promise;
    promise.spec.has_certificate = true;
    promise.size_bytes = *segment_size_bytes(promise.spec);
    auto allocated = allocate_segment(promise.size_bytes);
    REQUIRE_OK(allocated);
    reservation.memfd = std::move(*allocated);
    {
      Mapping mapping = reservation.map();
      const SegmentContents contents{*promise.document_tokens, promise.parent, promise.digests,
                                     PrefixTreatment::none};
      auto writer = SegmentWriter::create(promise.spec, contents, mapping.writable_bytes());
      REQUIRE_OK(writer);
      REQUIRE_OK(writer->encode_layer(0, reservation.values[0].source()));
      REQUIRE_OK(writer->set_certificate(0, error, 16));
      REQUIRE_OK(writer->finish());
    }
    const auto sealed = seal_and_verify(reservation.memfd.get(), promise);
    if (!(error >= 0 && std::isfinite(error))) {
      CHECK(sealed.status().code() == POLYKV_ERR_CORRUPT);
      continue;
    }
    REQUIRE_OK(sealed);
    REQUIRE(sealed->layers.size() == 1);
    CHECK(sealed->layers[0].profiles == 1U << static_cast<uint32_t>(Profile::k8v8));
    CHECK(sealed->layers[0].query_count == 16);
    CHECK(sealed->layers[0].relative_error == error);
  }
}

TEST_CASE("a reader can neither write, truncate, map writable nor protect writable") {
  const Reservation reservation;
  reservation.write_honestly();
  const auto readable = seal_and_verify(reservation.memfd.get(), reservation.promise);
  REQUIRE_OK(readable);
  const int fd = readable->readable.get();
  const size_t size = reservation.promise.size_bytes;
  CHECK(write(fd, "x", 1) == -1);
  CHECK(ftruncate(fd, 0) == -1);
  CHECK(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
  void* mapped = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  REQUIRE(mapped != MAP_FAILED);
  CHECK(mprotect(mapped, size, PROT_READ | PROT_WRITE) == -1);
  munmap(mapped, size);
}

TEST_CASE("reopened read-write through /proc, it opens or not, but cannot be changed") {
  const Reservation reservation;
  reservation.write_honestly();
  const auto readable = seal_and_verify(reservation.memfd.get(), reservation.promise);
  REQUIRE_OK(readable);
  const std::string path = "/proc/self/fd/" + std::to_string(readable->readable.get());
  const UniqueFd again(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (again) {
    CHECK(write(again.get(), "x", 1) == -1);
    CHECK(errno == EPERM);
    CHECK(ftruncate(again.get(), 0) == -1);
    CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0) == MAP_FAILED);
    CHECK(fallocate(again.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == -1);
  }
}

TEST_CASE("a segment still mapped writable is refused and can be committed later") {
  const Reservation reservation;
  reservation.write_honestly();
  {
    const Mapping still = reservation.map();
    CHECK(reservation.commit().code() == POLYKV_ERR_BUSY);
    CHECK(!seal_against_writing(reservation.memfd.get()));
  }
  CHECK_OK(reservation.commit());
}

TEST_CASE("a forked child's writable mapping counts as well") {
  const Reservation reservation;
  reservation.write_honestly();
  int ready[2];
  int done[2];
  REQUIRE((pipe(ready) == 0 && pipe(done) == 0));
  Mapping mapping = reservation.map();
  const pid_t child = fork();
  if (child == 0) {
    close(done[1]);
    char byte = 0;
    (void)!write(ready[1], "x", 1);
    (void)!read(done[0], &byte, 1);
    _exit(0);
  }
  char byte = 0;
  REQUIRE(read(ready[0], &byte, 1) == 1);
  mapping.reset();
  CHECK(reservation.commit().code() == POLYKV_ERR_BUSY);
  for (const int fd : {ready[0], ready[1], done[0], done[1]}) close(fd);
  waitpid(child, nullptr, 0);
  CHECK_OK(reservation.commit());
}

TEST_CASE("a producer's own seals are a typed error") {
  const Reservation reservation;
  reservation.write_honestly();
  REQUIRE(fcntl(reservation.memfd.get(), F_ADD_SEALS, F_SEAL_SEAL) == 0);
  const Status status = reservation.commit();
  CHECK(status.code() == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(status.message().find("seals of its own") != std::string::npos);
}

TEST_CASE("holes punched by the producer are found before they are read") {
  const Reservation reservation;
  reservation.write_honestly();
  REQUIRE(fallocate(reservation.memfd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096,
                    4096) == 0);
  const Status status = reservation.commit();
  CHECK(status.code() == POLYKV_ERR_CORRUPT);
  CHECK(status.message().find("holes") != std::string::npos);
}

TEST_CASE("a segment that was never written, or whose payload changed, is corrupt") {
  const Reservation empty;
  CHECK(empty.commit().code() == POLYKV_ERR_CORRUPT);
  const Reservation damaged;
  damaged.write_honestly();
  {
    Mapping mapping = damaged.map();
    mapping.writable_bytes()[damaged.promise.size_bytes - 4096] ^= 1;
  }
  CHECK(damaged.commit().code() == POLYKV_ERR_CORRUPT);
}

TEST_CASE("contents other than promised are corrupt, however well formed") {
  SECTION("another model") {
    const Reservation reservation;
    SegmentSpec spec = reservation.promise.spec;
    spec.identity.fingerprint[0] ^= 1;
    reservation.write(spec, chain_root(spec.identity), *reservation.promise.document_tokens);
    CHECK(reservation.commit().code() == POLYKV_ERR_CORRUPT);
  }
  SECTION("other tokens") {
    const Reservation reservation;
    std::vector<uint32_t> tokens = *reservation.promise.document_tokens;
    tokens[5] += 1;
    reservation.write(reservation.promise.spec, reservation.promise.parent, tokens);
    CHECK(reservation.commit().message().find("token ids") != std::string::npos);
  }
  SECTION("another place in the chain") {
    const Reservation reservation;
    reservation.write(reservation.promise.spec, Digest{9}, *reservation.promise.document_tokens);
    CHECK(reservation.commit().code() == POLYKV_ERR_CORRUPT);
  }
  SECTION("other digests") {
    Reservation reservation;
    reservation.write_honestly();
    reservation.promise.digests[0][0] ^= 1;
    CHECK(reservation.commit().message().find("digests") != std::string::npos);
  }
}
