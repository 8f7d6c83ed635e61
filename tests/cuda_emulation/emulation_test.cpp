// The emulation finds what it is there to find.
#include "tests/cuda_emulation/emulation.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>
#include <vector>

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr Schedule kSchedules[] = {
    {Order::ascending}, {Order::descending}, {Order::random, 1}, {Order::random, 2}};

/// Every thread takes its neighbour's number from shared memory.
struct NeighbourKernel {
  struct Arguments {
    uint32_t* out;
    bool skips_last;        // one thread does not come to the barrier
    bool ends_first;        // one thread ends before it
    bool is_other_barrier;  // one thread is at another one
  };
  static constexpr uint32_t kThreads = 96;
  struct Shared {
    uint32_t numbers[kThreads];
  };
  template <typename Thread>
  static void run(Thread& cuda, const Arguments& a) {
    auto& shared = cuda.template shared<Shared>();
    const uint32_t thread = cuda.thread_index();
    shared.numbers[thread] = cuda.block_index() * 1000 + thread;
    if (a.ends_first && thread == 40) return;
    if (!a.skips_last || thread != kThreads - 1) {
      if (a.is_other_barrier && thread == 40) {
        cuda.sync_threads(2);
      } else {
        cuda.sync_threads(1);
      }
    }
    if (a.skips_last) cuda.sync_warp(3);
    a.out[cuda.block_index() * kThreads + thread] = shared.numbers[(thread + 1) % kThreads];
  }
};

/// Sums of a warp's lanes, several times over.
struct WarpSumKernel {
  struct Arguments {
    float* out;
  };
  static constexpr uint32_t kThreads = 64;
  struct Shared {};
  template <typename Thread>
  static void run(Thread& cuda, const Arguments& a) {
    float total = 0;
    for (uint32_t round = 0; round < 5; ++round) {
      auto sum = static_cast<float>(cuda.thread_index() + round);
      for (uint32_t mask = 16; mask > 0; mask /= 2) sum += cuda.shuffle_xor(sum, mask);
      total += sum;
    }
    a.out[cuda.thread_index()] = total;
  }
};

struct UnwrittenKernel {
  struct Arguments {
    float* out;
  };
  static constexpr uint32_t kThreads = 32;
  struct Shared {
    float value;
  };
  template <typename Thread>
  static void run(Thread& cuda, const Arguments& a) {
    a.out[cuda.block_index()] = cuda.template shared<Shared>().value;
    cuda.template shared<Shared>().value = 1;
  }
};

std::string failure(const NeighbourKernel::Arguments& arguments, const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  launcher.launch<NeighbourKernel>(1, arguments);
  return launcher.status().message();
}

}  // namespace

TEST_CASE("threads of a block see what others wrote before a barrier, in every schedule") {
  for (const Schedule& schedule : kSchedules) {
    std::vector<uint32_t> out(3 * 96);
    EmulatedLauncher launcher(schedule);
    launcher.launch<NeighbourKernel>(3, {out.data(), false, false, false});
    REQUIRE(launcher.status().is_ok());
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < out.size(); ++i)
      wrong += out[i] != i / 96 * 1000 + (i + 1) % 96 ? 1U : 0U;
    CHECK(wrong == 0);
  }
}

TEST_CASE("a barrier that is taken away shows in the result, in every schedule") {
  for (Schedule schedule : kSchedules) {
    schedule.removed_sync = 1;
    std::vector<uint32_t> out(96);
    EmulatedLauncher launcher(schedule);
    launcher.launch<NeighbourKernel>(1, {out.data(), false, false, false});
    REQUIRE(launcher.status().is_ok());
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < 96; ++i) wrong += out[i] != (i + 1) % 96 ? 1U : 0U;
    CHECK(wrong > 0);
  }
}

TEST_CASE(
    "a thread that does not come to a barrier, ends before it or is at another one is named") {
  for (const Schedule& schedule : kSchedules) {
    std::vector<uint32_t> out(96);
    CHECK(failure({out.data(), true, false, false}, schedule).find("barrier") != std::string::npos);
    CHECK(failure({out.data(), false, true, false}, schedule).find("ended") != std::string::npos);
    const std::string other = failure({out.data(), false, false, true}, schedule);
    CHECK(other.find("barriers") != std::string::npos);
    CHECK(other.find("40") != std::string::npos);
    // And the emulation goes on to work.
    CHECK(failure({out.data(), false, false, false}, schedule).empty());
  }
}

TEST_CASE("lanes of a warp exchange words, exchange after exchange, in every schedule") {
  for (const Schedule& schedule : kSchedules) {
    std::vector<float> out(64);
    EmulatedLauncher launcher(schedule);
    launcher.launch<WarpSumKernel>(1, {out.data()});
    REQUIRE(launcher.status().is_ok());
    for (uint32_t i = 0; i < 64; ++i) CHECK(out[i] == (i < 32 ? 5 * 496 + 320 : 5 * 1520 + 320));
  }
}

TEST_CASE("shared memory holds no number when a block begins, whatever the one before left") {
  std::vector<float> out(3);
  EmulatedLauncher launcher({Order::random, 3});
  launcher.launch<UnwrittenKernel>(3, {out.data()});
  REQUIRE(launcher.status().is_ok());
  // The last lane of the schedule may have seen what the first wrote, another block's never.
  for (const float value : out) CHECK((std::isnan(value) || value == 1));
  CHECK(std::isnan(out[0] + out[1] + out[2]) == std::isnan(out[0] * out[1] * out[2]));
}
