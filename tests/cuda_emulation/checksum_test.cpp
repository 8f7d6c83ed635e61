// Checksums of the device against the library that makes those of a segment.
#include <xxhash.h>

#include <catch2/catch.hpp>
#include <random>

#include "tests/cuda_emulation/device_calls.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr Schedule kSchedules[] = {{Order::ascending}, {Order::descending}, {Order::random, 5}};

std::vector<uint64_t> random_words(size_t count) {
  std::mt19937_64 random(count);
  std::vector<uint64_t> words(count);
  for (uint64_t& word : words) word = random();
  return words;
}

}  // namespace

TEST_CASE("the device's checksums are XXH3's, whatever the size") {
  const std::vector<uint64_t> words = random_words(12'000);
  const auto* bytes = reinterpret_cast<const uint8_t*>(words.data());
  std::vector<cuda::ChecksumRange> ranges;
  for (const uint64_t size : {241U, 255U, 256U, 257U, 1023U, 1024U, 1025U, 1087U, 1088U, 1089U,
                              2048U, 2049U, 5000U, 32'768U, 32'769U, 65'537U, 70'001U, 90'000U})
    ranges.push_back({bytes + ranges.size() * 8, size});
  for (const Schedule& schedule : kSchedules) {
    std::vector<uint64_t> sums(ranges.size());
    const Status status = device_checksum(ranges, sums.data(), schedule);
    INFO(status.message());
    REQUIRE_OK(status);
    for (size_t i = 0; i < ranges.size(); ++i) {
      INFO(ranges[i].size_bytes << " bytes");
      CHECK(sums[i] == XXH3_64bits(ranges[i].data, ranges[i].size_bytes));
    }
  }
}

TEST_CASE("more ranges than a launch takes have each their own checksum") {
  const std::vector<uint64_t> words = random_words(200);
  const auto* bytes = reinterpret_cast<const uint8_t*>(words.data());
  std::vector<cuda::ChecksumRange> ranges;
  for (uint64_t i = 0; i < 130; ++i) ranges.push_back({bytes + i * 8, 241 + i});
  std::vector<uint64_t> sums(ranges.size());
  REQUIRE_OK(device_checksum(ranges, sums.data(), {}));
  for (size_t i = 0; i < ranges.size(); ++i)
    CHECK(sums[i] == XXH3_64bits(ranges[i].data, ranges[i].size_bytes));
}

TEST_CASE("checksums on the device refuse what they would get wrong, and say why") {
  const std::vector<uint64_t> words = random_words(200);
  const auto* bytes = reinterpret_cast<const uint8_t*>(words.data());
  uint64_t sum = 7;
  const auto refused = [&](const uint8_t* data, uint64_t size_bytes, uint64_t* sums) {
    const cuda::ChecksumRange range{data, size_bytes};
    const Status status = device_checksum({&range, 1}, sums, {});
    return status.code() == POLYKV_ERR_INVALID_ARGUMENT &&
           status.message().find("checksum on the device") == 0;
  };
  CHECK(refused(bytes, 240, &sum));
  CHECK(refused(bytes + 4, 300, &sum));
  CHECK(refused(nullptr, 300, &sum));
  CHECK(refused(bytes, 300, nullptr));
  CHECK(sum == 7);
  CHECK_OK(device_checksum({}, &sum, {}));
}
