// The emulation finds what it is there to find.
#include "tests/cuda_emulation/emulation.h"
#include "tests/support/require_ok.h"

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

/// [16, 32] x [32, 8], as the kernels' products are.
struct ProductKernel {
  struct Arguments {
    const int8_t* a;
    const int8_t* b;
    int32_t* out;
  };
  static constexpr uint32_t kThreads = 32;
  struct Shared {};
  template <typename Thread>
  static void run(Thread& cuda, const Arguments& g) {
    const uint32_t i = cuda.thread_index() / 4;
    const uint32_t s = cuda.thread_index() % 4;
    uint32_t a[4] = {};
    uint32_t b[2] = {};
    for (uint32_t byte = 0; byte < 4; ++byte) {
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t k = 16 * half + 4 * s + byte;
        a[2 * half] |= uint32_t{static_cast<uint8_t>(g.a[i * 32 + k])} << (8 * byte);
        a[2 * half + 1] |= uint32_t{static_cast<uint8_t>(g.a[(i + 8) * 32 + k])} << (8 * byte);
        b[half] |= uint32_t{static_cast<uint8_t>(g.b[k * 8 + i])} << (8 * byte);
      }
    }
    int32_t sums[4] = {1, 1, 1, 1};
    cuda.multiply_fragments(sums, a, b[0], b[1]);
    for (uint32_t j = 0; j < 4; ++j) g.out[(i + j / 2 * 8) * 8 + 2 * s + j % 2] = sums[j];
  }
};

}  // namespace

TEST_CASE("products of fragments are those of matrices, added to what was there") {
  std::vector<int8_t> a(16 * 32);
  std::vector<int8_t> b(32 * 8);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<int8_t>(i * 37 + i / 7);
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<int8_t>(i * 53 + i / 3);
  std::vector<int32_t> want(16 * 8, 1);
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      for (size_t k = 0; k < 32; ++k) want[row * 8 + column] += a[row * 32 + k] * b[k * 8 + column];
    }
  }
  for (const Schedule& schedule : kSchedules) {
    std::vector<int32_t> out(16 * 8);
    EmulatedLauncher launcher(schedule);
    launcher.launch<ProductKernel>(1, {a.data(), b.data(), out.data()});
    REQUIRE_OK(launcher.status());
    CHECK(out == want);
  }
}

TEST_CASE("threads of a block see what others wrote before a barrier, in every schedule") {
  for (const Schedule& schedule : kSchedules) {
    std::vector<uint32_t> out(3 * 96);
    EmulatedLauncher launcher(schedule);
    launcher.launch<NeighbourKernel>(3, {out.data(), false, false, false});
    REQUIRE_OK(launcher.status());
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
    REQUIRE_OK(launcher.status());
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
    REQUIRE_OK(launcher.status());
    for (uint32_t i = 0; i < 64; ++i) CHECK(out[i] == (i < 32 ? 5 * 496 + 320 : 5 * 1520 + 320));
  }
}

TEST_CASE("shared memory holds no number when a block begins, whatever the one before left") {
  std::vector<float> out(3);
  EmulatedLauncher launcher({Order::random, 3});
  launcher.launch<UnwrittenKernel>(3, {out.data()});
  REQUIRE_OK(launcher.status());
  // The last lane of the schedule may have seen what the first wrote, another block's never.
  for (const float value : out) CHECK((std::isnan(value) || value == 1));
  CHECK(std::isnan(out[0] + out[1] + out[2]) == std::isnan(out[0] * out[1] * out[2]));
}
