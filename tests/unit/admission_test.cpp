// Admission and eviction as pure functions, and the memory probe on control groups made of files.
#include "daemon/admission.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

using namespace polykv;
using namespace polykv::daemon;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

AdmissionRequest request(uint64_t needed, uint64_t budget, uint64_t charged) {
  AdmissionRequest request;
  request.needed_bytes = needed;
  request.budget_bytes = budget;
  request.charged_bytes = charged;
  request.segment_count_max = 100;
  return request;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Files under a folder that stand for /sys/fs/cgroup and /proc.
class FakeMachine {
 public:
  FakeMachine() {
    folder_ =
        std::filesystem::temp_directory_path() / ("polykv-admission-" + std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
    write("meminfo", "MemTotal: 1048576 kB\nMemFree: 1 kB\nMemAvailable: 524288 kB\n");
  }
  ~FakeMachine() { std::filesystem::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name) << text;
  }
  std::vector<MemoryHeadroom> measure() const {
    const MemoryProbe probe{(folder_ / "cgroup").string(), (folder_ / "self").string(),
                            (folder_ / "meminfo").string()};
    const auto measured = probe.measure();
    REQUIRE(measured.is_ok());
    return *measured;
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace

TEST_CASE("what fits into the budget is admitted without evicting anything") {
  AdmissionRequest fits = request(10, 100, 90);
  const EvictionCandidate candidates[] = {{1, 1, 50, false, 1}};
  fits.candidates = candidates;
  const auto admission = admit(fits);
  REQUIRE(admission.is_ok());
  CHECK(admission->evict.empty());
}

TEST_CASE("a refusal names what is needed, what is free of the budget, and a remedy") {
  AdmissionRequest too_much = request(11, 100, 90);
  too_much.retiring_bytes = 30;
  const auto admission = admit(too_much);
  REQUIRE(!admission.is_ok());
  CHECK(admission.status().code() == POLYKV_ERR_BUDGET);
  const std::string& message = admission.status().message();
  CHECK(contains(message, "11 bytes needed, 10 free of the budget of 100 bytes"));
  CHECK(contains(message, "30 are of removed documents that processes still hold"));
  CHECK(contains(message, "--budget"));
}

TEST_CASE("the least recently used goes first, as many as needed and no more") {
  const EvictionCandidate candidates[] = {
      {1, 30, 10, false, 1}, {2, 10, 10, false, 1}, {3, 20, 10, false, 1}, {4, 5, 10, true, 1}};
  AdmissionRequest short_of_15 = request(15, 100, 100);
  short_of_15.candidates = candidates;
  const auto admission = admit(short_of_15);
  REQUIRE(admission.is_ok());
  CHECK(admission->evict == std::vector<uint64_t>{2, 3});
}

TEST_CASE("a leased document is never evicted, and nothing is when it would not be enough") {
  const EvictionCandidate candidates[] = {{1, 1, 40, true, 1}, {2, 2, 5, false, 1}};
  AdmissionRequest short_of_10 = request(10, 100, 100);
  short_of_10.candidates = candidates;
  const auto admission = admit(short_of_10);
  REQUIRE(!admission.is_ok());
  CHECK(contains(admission.status().message(), "and 5 in documents that could be evicted"));
  CHECK(choose_evictions(candidates, 10).empty());
}

TEST_CASE("a document whose memory other processes hold is not worth evicting") {
  const EvictionCandidate candidates[] = {{1, 1, 0, false, 0}, {2, 2, 10, false, 1}};
  CHECK(choose_evictions(candidates, 10) == std::vector<uint64_t>{2});
}

TEST_CASE("the number of segments is a limit too, and eviction acts on it") {
  const EvictionCandidate candidates[] = {
      {1, 30, 10, false, 1}, {2, 10, 10, false, 2}, {3, 20, 0, false, 0}, {4, 5, 10, true, 9}};
  AdmissionRequest one_more = request(10, 1000, 0);
  one_more.candidates = candidates;
  one_more.segment_count_max = 20;
  one_more.segment_count = 19;
  REQUIRE(admit(one_more).is_ok());
  CHECK(admit(one_more)->evict.empty());
  one_more.segment_count = 21;
  REQUIRE(admit(one_more).is_ok());
  CHECK(admit(one_more)->evict == std::vector<uint64_t>{2});
  one_more.segment_count = 22;
  REQUIRE(admit(one_more).is_ok());
  CHECK(admit(one_more)->evict == std::vector<uint64_t>{2, 1});
  one_more.segment_count = 23;
  const auto refused = admit(one_more);
  REQUIRE(!refused.is_ok());
  CHECK(refused.status().code() == POLYKV_ERR_LIMIT);
  CHECK(contains(refused.status().message(), "its maximum of 20 segments"));
}

TEST_CASE("memory that is short on the machine is named, whatever the budget allows") {
  const MemoryHeadroom headrooms[] = {{"this machine", 1000, "end programs"},
                                      {"control group /a", 50, "raise its limit"}};
  AdmissionRequest needs_60 = request(60, 1000, 0);
  needs_60.headrooms = headrooms;
  const auto admission = admit(needs_60);
  REQUIRE(!admission.is_ok());
  CHECK(contains(admission.status().message(),
                 "60 bytes needed, 50 free of control group /a; raise its limit"));
}

TEST_CASE("what is reserved but not yet allocated, and the reserve, count as used") {
  const MemoryHeadroom headrooms[] = {{"this machine", 100, ""}};
  AdmissionRequest needs_50 = request(50, 1000, 0);
  needs_50.headrooms = headrooms;
  CHECK(admit(needs_50).is_ok());
  needs_50.unallocated_bytes = 30;
  needs_50.reserve_bytes = 20;
  CHECK(admit(needs_50).is_ok());
  needs_50.reserve_bytes = 21;
  CHECK(!admit(needs_50).is_ok());
}

TEST_CASE("eviction also makes room on the machine") {
  const MemoryHeadroom headrooms[] = {{"this machine", 5, ""}};
  const EvictionCandidate candidates[] = {{1, 1, 20, false, 1}};
  AdmissionRequest needs_20 = request(20, 1000, 0);
  needs_20.headrooms = headrooms;
  needs_20.candidates = candidates;
  const auto admission = admit(needs_20);
  REQUIRE(admission.is_ok());
  CHECK(admission->evict == std::vector<uint64_t>{1});
}

TEST_CASE("without control groups MemAvailable alone limits") {
  const FakeMachine machine;
  const auto headrooms = machine.measure();
  REQUIRE(headrooms.size() == 1);
  CHECK(headrooms[0].free_bytes == 512 * kMiB);
}

TEST_CASE("control groups v2: memory.max and memory.high of the group and all its ancestors") {
  const FakeMachine machine;
  machine.write("self", "0::/system.slice/polykvd.service\n");
  machine.write("cgroup/system.slice/polykvd.service/memory.max", "max\n");
  machine.write("cgroup/system.slice/polykvd.service/memory.high", "104857600\n");
  machine.write("cgroup/system.slice/polykvd.service/memory.current", "41943040\n");
  machine.write("cgroup/system.slice/memory.max", "209715200\n");
  machine.write("cgroup/system.slice/memory.current", "188743680\n");
  machine.write("cgroup/system.slice/memory.stat", "anon 5\ninactive_file 10485760\n");
  const auto headrooms = machine.measure();
  REQUIRE(headrooms.size() == 3);
  CHECK(headrooms[1].name == "control group /system.slice/polykvd.service (memory.high)");
  CHECK(headrooms[1].free_bytes == 60 * kMiB);
  CHECK(headrooms[2].name == "control group /system.slice (memory.max)");
  CHECK(headrooms[2].free_bytes == 30 * kMiB);
}

TEST_CASE("control groups v1: memory.limit_in_bytes, also of the root of the hierarchy") {
  const FakeMachine machine;
  machine.write("self", "3:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n");
  machine.write("cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
  machine.write("cgroup/memory/a/b/memory.usage_in_bytes", "1048576\n");
  machine.write("cgroup/memory/memory.limit_in_bytes", "20971520\n");
  machine.write("cgroup/memory/memory.usage_in_bytes", "10485760\n");
  machine.write("cgroup/memory/memory.stat", "total_inactive_file 1048576\n");
  const auto headrooms = machine.measure();
  REQUIRE(headrooms.size() == 3);
  CHECK(headrooms[1].free_bytes > 1000 * kMiB);
  CHECK(headrooms[2].name == "control group / (memory.limit_in_bytes)");
  CHECK(headrooms[2].free_bytes == 11 * kMiB);
}

TEST_CASE("a group that uses more than its limit has nothing free") {
  const FakeMachine machine;
  machine.write("self", "0::/\n");
  machine.write("cgroup/memory.max", "100\n");
  machine.write("cgroup/memory.current", "200\n");
  const auto headrooms = machine.measure();
  REQUIRE(headrooms.size() == 2);
  CHECK(headrooms[1].free_bytes == 0);
}
