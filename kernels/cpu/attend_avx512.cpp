#include "kernels/cpu/attend_ops.h"

#if defined(__x86_64__)

#ifdef POLYKV_EMULATE_AVX512
// For tests on machines without it: the same functions in plain code.
#include "kernels/cpu/avx512_emulation.h"
// Behind it, as it needs the names that this sets.
#include <simde/x86/f16c.h>
#define POLYKV_TARGET
#define POLYKV_INLINE inline
#else
#include <immintrin.h>
#define POLYKV_TARGET \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")))
#define POLYKV_INLINE POLYKV_TARGET inline __attribute__((always_inline))
#endif

#include <array>
#include <cstring>
#include <limits>

#include "kernels/codebooks.h"
#include "kernels/cpu/ops.h"

namespace polykv::cpu {

namespace {

using Vector = __m512i;
constexpr uint32_t kWidth = 16;
constexpr uint32_t kKeyVectors = 2;
constexpr uint32_t value_vectors(uint32_t rows) {
  return rows <= 2 ? 4 : 2;
}

POLYKV_INLINE Vector load(const uint8_t* bytes) {
  return _mm512_loadu_si512(bytes);
}
POLYKV_INLINE Vector splat(int byte) {
  return _mm512_set1_epi8(static_cast<char>(byte));
}
POLYKV_INLINE Vector bit_and(Vector a, Vector b) {
  return _mm512_and_si512(a, b);
}
POLYKV_INLINE Vector bit_or(Vector a, Vector b) {
  return _mm512_or_si512(a, b);
}
POLYKV_INLINE Vector bit_xor(Vector a, Vector b) {
  return _mm512_xor_si512(a, b);
}
POLYKV_INLINE Vector shift_left(Vector x, int bits) {
  return _mm512_slli_epi16(x, static_cast<unsigned>(bits));
}
POLYKV_INLINE Vector shift_right(Vector x, int bits) {
  return _mm512_srli_epi16(x, static_cast<unsigned>(bits));
}

// Products of int8: a number is 128 times one of them plus another.
constexpr int32_t kLevelBias = 128;
constexpr int32_t kLargestNumber = 127 * 128 + 63;
constexpr float kWeightLimit = kLargestNumber;
constexpr float query_limit(uint32_t) {
  return kLargestNumber;
}
static_assert(128LL * kLargestNumber * kMaxHeadDim < INT32_MAX);

struct Words {
  int32_t first;   // of 128
  int32_t second;  // the rest, -64 to 63
};
POLYKV_INLINE Words split(int32_t a, int32_t b, int32_t c, int32_t d) {
  const auto four = [](int32_t x, int32_t y, int32_t z, int32_t w) POLYKV_TARGET {
    return static_cast<int32_t>(
        (static_cast<uint32_t>(x) & 255U) | (static_cast<uint32_t>(y) & 255U) << 8 |
        (static_cast<uint32_t>(z) & 255U) << 16 | static_cast<uint32_t>(w) << 24);
  };
  const int32_t high[4] = {(a + 64) >> 7, (b + 64) >> 7, (c + 64) >> 7, (d + 64) >> 7};
  return {four(high[0], high[1], high[2], high[3]),
          four(a - high[0] * 128, b - high[1] * 128, c - high[2] * 128, d - high[3] * 128)};
}

template <uint32_t Bits>
struct Levels {
  Vector table;  // 2^Bits levels, repeated: bits of neighbours above a code do no harm

  POLYKV_INLINE Levels() {
    alignas(64) static constexpr auto kBytes = [] {
      std::array<uint8_t, 64> bytes{};
      const Codebook& book = codebook(Bits);
      for (uint32_t code = 0; code < 64; ++code)
        bytes[code] = static_cast<uint8_t>(book.levels[code % book.size] + kLevelBias);
      return bytes;
    }();
    table = load(kBytes.data());
  }
  /// Of codes in the low or the high nibbles of `x`, whose fifth bits are bit number `bit` of
  /// `upper`, the sixth ones the next.
  POLYKV_INLINE Vector low(Vector x, Vector upper, int bit) const {
    if constexpr (Bits > 4) {
      const Vector bits = bit < 4 ? shift_left(upper, 4 - bit) : shift_right(upper, bit - 4);
      constexpr int kFirstChooses = 0xca;  // a ? b : c, bit by bit
      x = _mm512_ternarylogic_epi32(splat(15), x, bits, kFirstChooses);
    }
    return _mm512_permutexvar_epi8(x, table);
  }
  POLYKV_INLINE Vector high(Vector x, Vector upper, int bit) const {
    return low(shift_right(x, 4), upper, bit);
  }
};
template <>
struct Levels<8> {};

struct Sums {
  Vector first;
  Vector second;
  POLYKV_INLINE Sums() : first(_mm512_setzero_si512()), second(_mm512_setzero_si512()) {}
  POLYKV_INLINE void store(int32_t* out) const {
    const Vector all = _mm512_add_epi32(_mm512_slli_epi32(first, 7), second);
    _mm512_store_si512(out, all);
  }
};

/// sums[i][row] += levels[i] x the row's words number `word` and `word` + `apart`.
template <uint32_t Rows, uint32_t Vectors>
POLYKV_INLINE void multiply(const Vector* levels, const int32_t* const* words, uint32_t word,
                            uint32_t apart, Sums (*sums)[Rows]) {
#pragma GCC unroll 4
  for (uint32_t row = 0; row < Rows; ++row) {
    const Vector first = _mm512_set1_epi32(words[row][word]);
    const Vector second = _mm512_set1_epi32(words[row][word + apart]);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < Vectors; ++i) {
      sums[i][row].first = _mm512_dpbusd_epi32(sums[i][row].first, levels[i], first);
      sums[i][row].second = _mm512_dpbusd_epi32(sums[i][row].second, levels[i], second);
    }
  }
}

#include "kernels/cpu/attend_block.inl"

}  // namespace

#ifdef POLYKV_EMULATE_AVX512

const AttendOps* emulated_avx512_attend_ops() {
  static constexpr AttendOps kOps = {"avx512 emulated", kWidth, pack_query, attend_block};
  return &kOps;
}

#else

const AttendOps* avx512_attend_ops() {
  static constexpr AttendOps kOps = {"avx512", kWidth, pack_query, attend_block};
  static const bool usable = avx512_ops() != nullptr && __builtin_cpu_supports("avx512vnni");
  return usable ? &kOps : nullptr;
}

#endif

}  // namespace polykv::cpu

#else

namespace polykv::cpu {
const AttendOps* avx512_attend_ops() {
  return nullptr;
}
}  // namespace polykv::cpu

#endif
