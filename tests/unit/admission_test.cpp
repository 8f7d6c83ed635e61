// Admission and eviction as pure functions, and the memory probe on control groups made of files.
#include "daemon/admission.h"
#include "tests/support/require_ok.h"

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
    REQUIRE_OK(measured);
    return *measured;
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace

TEST_CASE("what fits into the budget needs no room") {
  CHECK(shortage(request(10, 100, 90)).is_none());
}

TEST_CASE("a refusal names what is needed, what is free of the budget, and a remedy") {
  AdmissionRequest too_much = request(11, 100, 90);
  too_much.retiring_bytes = 30;
  CHECK(shortage(too_much).bytes == 1);
  const Status refused = refusal(too_much, {});
  CHECK(refused.code() == POLYKV_ERR_BUDGET);
  CHECK(contains(refused.message(), "11 bytes needed, 10 free of the budget of 100 bytes"));
  CHECK(contains(refused.message(), "30 are of removed documents that processes still hold"));
  CHECK(contains(refused.message(), "--budget"));
}

TEST_CASE("a refusal tells what eviction could have freed") {
  const AdmissionRequest short_of_10 = request(10, 100, 100);
  CHECK(shortage(short_of_10).bytes == 10);
  CHECK(
      contains(refusal(short_of_10, {5, 1}).message(), "and 5 in documents that could be evicted"));
}

TEST_CASE("the number of segments is a limit too") {
  AdmissionRequest one_more = request(10, 1000, 0);
  one_more.segment_count_max = 20;
  one_more.segment_count = 19;
  CHECK(shortage(one_more).is_none());
  one_more.segment_count = 21;
  CHECK(shortage(one_more).segments == 2);
  const Status refused = refusal(one_more, {1000, 1});
  CHECK(refused.code() == POLYKV_ERR_LIMIT);
  CHECK(contains(refused.message(), "its maximum of 20 segments"));
}

TEST_CASE("memory that is short on the machine is named, whatever the budget allows") {
  const MemoryHeadroom headrooms[] = {{"this machine", 1000, "end programs"},
                                      {"control group /a", 50, "raise its limit"}};
  AdmissionRequest needs_60 = request(60, 1000, 0);
  needs_60.headrooms = headrooms;
  CHECK(shortage(needs_60).bytes == 10);
  CHECK(contains(refusal(needs_60, {}).message(),
                 "60 bytes needed, 50 free of control group /a; raise its limit"));
}

TEST_CASE("what is reserved but not yet allocated, and the reserve, count as used") {
  const MemoryHeadroom headrooms[] = {{"this machine", 100, ""}};
  AdmissionRequest needs_50 = request(50, 1000, 0);
  needs_50.headrooms = headrooms;
  CHECK(shortage(needs_50).is_none());
  needs_50.unallocated_bytes = 30;
  needs_50.reserve_bytes = 20;
  CHECK(shortage(needs_50).is_none());
  needs_50.reserve_bytes = 21;
  CHECK(shortage(needs_50).bytes == 1);
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
