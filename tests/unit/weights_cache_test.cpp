// The weights cache file: what it gives back, and each way in which it may not be trusted.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "daemon/prefill/model/model.h"
#include "daemon/prefill/model/weights.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/require_ok.h"

using namespace polykv;

namespace {

struct Fixture {
  Fixture() {
    std::string pattern = (std::filesystem::temp_directory_path() / "polykv-weights-XXXXXX");
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    folder = pattern;
    path = folder / "cache";
    REQUIRE_OK(weights.save_cache(path));
  }
  ~Fixture() { std::filesystem::remove_all(folder); }

  static Model open_model(const UniqueFd& file) {
    auto model = Model::open(file.get(), "tiny");
    REQUIRE_OK(model);
    return std::move(model).value();
  }
  polykv_status open(bool verify = false) const {
    return Weights::open_cache(path, model.config(), verify).status().code();
  }
  void write_at(uint64_t offset, char byte) const {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(byte);
    REQUIRE(file.good());
  }

  UniqueFd file = test::memfd_of(test::tiny_llama(1).build());  // the model borrows it
  Model model = open_model(file);
  Weights weights = Weights::load(model, 1).value();
  std::filesystem::path folder;
  std::string path;
};

}  // namespace

TEST_CASE("a cache gives back every value, and whose they are") {
  const Fixture fixture;
  const auto cached = Weights::open_cache(fixture.path, fixture.model.config(), true);
  REQUIRE_OK(cached);
  CHECK(cached->fingerprint() == fixture.weights.fingerprint());
  REQUIRE(cached->layout().value_count == fixture.weights.layout().value_count);
  CHECK(std::equal(cached->data(), cached->data() + cached->layout().value_count,
                   fixture.weights.data()));
  cached->touch();
  struct stat info {};
  REQUIRE(::stat(fixture.path.c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  // No temporary file is left.
  CHECK(std::distance(std::filesystem::directory_iterator(fixture.folder), {}) == 1);
}

TEST_CASE("a cache is replaced at once, under those who have mapped it") {
  const Fixture fixture;
  const auto before = Weights::open_cache(fixture.path, fixture.model.config());
  REQUIRE_OK(before);
  const UniqueFd other_file = test::memfd_of(test::tiny_llama(2).build());
  const Model other = Fixture::open_model(other_file);
  REQUIRE_OK(Weights::load(other, 1)->save_cache(fixture.path));
  CHECK(std::equal(before->data(), before->data() + before->layout().value_count,
                   fixture.weights.data()));
  // The configuration fits, so the fingerprint is what tells them apart.
  const auto after = Weights::open_cache(fixture.path, fixture.model.config(), true);
  REQUIRE_OK(after);
  CHECK(after->fingerprint() != before->fingerprint());
}

TEST_CASE("a cache that is not there, or not ours, is not used") {
  const Fixture fixture;
  SECTION("none") {
    std::filesystem::remove(fixture.path);
    CHECK(fixture.open() == POLYKV_ERR_NOT_FOUND);
  }
  SECTION("readable by others") {
    ::chmod(fixture.path.c_str(), 0644);
    CHECK(fixture.open() == POLYKV_ERR_PERMISSION);
  }
  SECTION("of another user") {
    if (::geteuid() != 0) return;
    REQUIRE(::chown(fixture.path.c_str(), 12345, 12345) == 0);
    CHECK(fixture.open() == POLYKV_ERR_PERMISSION);
  }
  SECTION("a link") {
    std::filesystem::rename(fixture.path, fixture.path + ".real");
    std::filesystem::create_symlink(fixture.path + ".real", fixture.path);
    CHECK(fixture.open() == POLYKV_ERR_SYSTEM);
  }
  SECTION("a folder") {
    std::filesystem::remove(fixture.path);
    std::filesystem::create_directory(fixture.path);
    CHECK(fixture.open() == POLYKV_ERR_CORRUPT);
  }
  SECTION("of another model") {
    ModelConfig other = fixture.model.config();
    other.rms_epsilon *= 2;
    CHECK(Weights::open_cache(fixture.path, other).status().code() == POLYKV_ERR_CORRUPT);
  }
}

TEST_CASE("a damaged cache is refused") {
  const Fixture fixture;
  const uint64_t size = std::filesystem::file_size(fixture.path);
  SECTION("cut") {
    const uint64_t to = GENERATE_COPY(uint64_t{0}, uint64_t{95}, uint64_t{4096}, size - 1);
    std::filesystem::resize_file(fixture.path, to);
    CHECK(fixture.open() == POLYKV_ERR_CORRUPT);
  }
  SECTION("longer") {
    std::filesystem::resize_file(fixture.path, size + 1);
    CHECK(fixture.open() == POLYKV_ERR_CORRUPT);
  }
  SECTION("a field of its head") {
    // Magic, version, tied output, value count, configuration.
    const uint64_t at = GENERATE(0, 8, 12, 16, 32, 63);
    fixture.write_at(at, '\x55');
    CHECK(fixture.open() == POLYKV_ERR_CORRUPT);
  }
  SECTION("a value, which the checksum finds") {
    fixture.write_at(size - 2, '\x55');
    CHECK(fixture.open(false) == POLYKV_OK);
    CHECK(fixture.open(true) == POLYKV_ERR_CORRUPT);
  }
}

TEST_CASE("a cache that cannot be written says so, and leaves nothing") {
  const Fixture fixture;
  const Status status = fixture.weights.save_cache((fixture.folder / "no" / "cache").string());
  CHECK(status.code() == POLYKV_ERR_SYSTEM);
  CHECK(status.message().find("choose a folder of your own") != std::string::npos);
}

TEST_CASE(
    "a file that is no cache is not written over; an empty one and another model's cache are") {
  const Fixture fixture;
  const std::string path = (fixture.folder / "notes.txt").string();
  std::ofstream(path) << "somebody's notes, longer than a magic number";
  const Status status = fixture.weights.save_cache(path);
  CHECK(status.code() == POLYKV_ERR_ALREADY_EXISTS);
  CHECK(status.message().find("notes.txt") != std::string::npos);
  CHECK(std::filesystem::file_size(path) == 44);
  std::ofstream(path, std::ios::trunc).close();
  CHECK_OK(fixture.weights.save_cache(path));
  CHECK_OK(fixture.weights.save_cache(path));
  CHECK(fixture.weights.save_cache(fixture.folder.string()).code() == POLYKV_ERR_ALREADY_EXISTS);
}
