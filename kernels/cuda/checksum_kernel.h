// XXH3-64 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md) of long inputs, a thread block an input.
//
// XXH3 has eight sums. Each 64 bytes, a stripe, add a product and a word to each of them; the sums are
// scrambled after 16 stripes, and only that has to be done in order. So warps add up the stripes of a
// group of 16 each, a lane one word of a stripe, and the first eight threads go through the groups.
//
// Expected: 1,024 bytes cost those eight threads about 30 cycles of latency, 60 GB/s an input: a
// segment's layers together are bound by memory from some 60 layers on, and before that still many times faster
// than copying them to the host.
#pragma once

#include <cstdint>

#include "kernels/cuda/checksum_call.h"
#include "kernels/cuda/thread.h"

namespace polykv::cuda {

struct ChecksumArguments {
  static constexpr uint32_t kMaxRanges = 64;
  ChecksumRange ranges[kMaxRanges];  // [thread block]
  ChecksumSecret secret;
  uint64_t* sums;  // [thread block]
};

struct ChecksumKernel {
  using Arguments = ChecksumArguments;
  static constexpr uint32_t kThreads = 256;
  static constexpr uint32_t kMinBlocks = 2;
  enum Sync : uint32_t { kGroupsAdded = 1, kSumsStored };

  static constexpr uint32_t kLanes = 8;  // XXH3's sums
  static constexpr uint32_t kStripeBytes = 64;
  static constexpr uint32_t kGroupStripes = 16;
  static constexpr uint32_t kWarps = kThreads / kWarpThreads;
  static constexpr uint32_t kWarpGroups = 4;  // in a round, so that many loads are under way
  static constexpr uint32_t kRoundGroups = kWarps * kWarpGroups;
  struct Shared {
    uint64_t groups[2][kRoundGroups][kLanes];  // a round's, while the one before is gone through
    uint64_t sums[kLanes];
  };

  static constexpr uint64_t kScramble = 0x9e3779b1U;        // XXH_PRIME32_1
  static constexpr uint64_t kLength = 0x9e3779b185ebca87U;  // XXH_PRIME64_1
  static constexpr uint64_t kAvalanche = 0x165667919e3779f9U;

  POLYKV_HOST_DEVICE static uint64_t load(const uint8_t* bytes) {
    return *reinterpret_cast<const uint64_t*>(bytes);
  }
  POLYKV_HOST_DEVICE static uint64_t load_unaligned(const uint8_t* bytes) {
    uint64_t word = 0;
    for (uint32_t i = 0; i < 8; ++i) word |= uint64_t{bytes[i]} << (8 * i);
    return word;
  }
  /// What a lane's word adds to its own sum; the word itself is added to its neighbour's.
  POLYKV_HOST_DEVICE static uint64_t product(uint64_t word, uint64_t secret) {
    const uint64_t key = word ^ secret;
    return (key & 0xffffffffU) * (key >> 32);
  }
  template <typename Thread>
  POLYKV_HOST_DEVICE static uint64_t shuffle_xor64(Thread& cuda, uint64_t value, uint32_t mask) {
    const uint32_t low = cuda.shuffle_xor(static_cast<uint32_t>(value), mask);
    const uint32_t high = cuda.shuffle_xor(static_cast<uint32_t>(value >> 32), mask);
    return uint64_t{high} << 32 | low;
  }

  /// What the stripes [16 group, `stripe_count`) of a group add to a lane's sum; for whole warps.
  template <typename Thread>
  POLYKV_HOST_DEVICE static uint64_t add_group(Thread& cuda, const Arguments& a,
                                               const uint8_t* data, uint64_t group,
                                               uint64_t stripe_count) {
    const uint32_t lane = cuda.thread_index() % kLanes;
    const uint32_t first = cuda.thread_index() % kWarpThreads / kLanes;
    constexpr uint32_t kAtOnce = kWarpThreads / kLanes;
    uint64_t products = 0;
    uint64_t words = 0;
    POLYKV_UNROLL for (uint32_t i = 0; i < kGroupStripes / kAtOnce; ++i) {
      const uint32_t in_group = first + i * kAtOnce;
      const uint64_t stripe = group * kGroupStripes + in_group;
      if (stripe >= stripe_count) continue;
      const uint64_t word = load(data + stripe * kStripeBytes + lane * 8);
      products += product(word, a.secret.words[in_group + lane]);
      words += word;
    }
    uint64_t sum = products + shuffle_xor64(cuda, words, 1);
    sum += shuffle_xor64(cuda, sum, kLanes);
    sum += shuffle_xor64(cuda, sum, 2 * kLanes);
    return sum;
  }

  POLYKV_HOST_DEVICE static uint64_t fold(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
    return (a * b) ^ __umul64hi(a, b);
#else
    __extension__ using Wide = unsigned __int128;
    const Wide wide = static_cast<Wide>(a) * b;
    return static_cast<uint64_t>(wide) ^ static_cast<uint64_t>(wide >> 64);
#endif
  }

  POLYKV_HOST_DEVICE static uint64_t merge(const uint64_t* sums, const ChecksumSecret& secret,
                                           uint64_t size_bytes) {
    uint64_t result = size_bytes * kLength;
    for (uint32_t i = 0; i < kLanes; i += 2)
      result += fold(sums[i] ^ secret.merge[i], sums[i + 1] ^ secret.merge[i + 1]);
    result ^= result >> 37;
    result *= kAvalanche;
    return result ^ (result >> 32);
  }

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    const ChecksumRange range = a.ranges[cuda.block_index()];
    // The last 64 bytes are a stripe of their own, whatever was before them.
    const uint64_t stripes = (range.size_bytes - 1) / kStripeBytes;
    const uint64_t groups = (stripes + kGroupStripes - 1) / kGroupStripes;
    const uint32_t thread = cuda.thread_index();
    const uint32_t warp = thread / kWarpThreads;
    const uint32_t lane = thread % kLanes;
    Shared& shared = cuda.template shared<Shared>();
    uint64_t sum = a.secret.first[lane];
    uint32_t half = 0;
    for (uint64_t round = 0; round < groups; round += kRoundGroups, half ^= 1U) {
      POLYKV_UNROLL for (uint32_t i = 0; i < kWarpGroups; ++i) {
        const uint32_t index = warp * kWarpGroups + i;
        const uint64_t added = add_group(cuda, a, range.data, round + index, stripes);
        if (thread % kWarpThreads < kLanes) shared.groups[half][index][lane] = added;
      }
      cuda.sync_threads(kGroupsAdded);
      if (thread >= kLanes) continue;
      for (uint32_t i = 0; i < kRoundGroups && round + i < groups; ++i) {
        sum += shared.groups[half][i][lane];
        if ((round + i + 1) * kGroupStripes > stripes) continue;
        sum = (sum ^ (sum >> 47) ^ a.secret.words[kGroupStripes + lane]) * kScramble;
      }
    }
    if (thread >= kWarpThreads) return;
    const uint64_t word = load_unaligned(range.data + range.size_bytes - kStripeBytes + lane * 8);
    sum += product(word, a.secret.last[lane]) + shuffle_xor64(cuda, word, 1);
    if (thread < kLanes) shared.sums[lane] = sum;
    cuda.sync_warp(kSumsStored);
    if (thread == 0) a.sums[cuda.block_index()] = merge(shared.sums, a.secret, range.size_bytes);
  }
};

}  // namespace polykv::cuda
