#include "kernels/cpu/attend_ops.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstring>
#include <limits>

#include "kernels/codebooks.h"
#include "kernels/cpu/ops.h"

#define POLYKV_TARGET __attribute__((target("avx2,fma,f16c")))
#define POLYKV_INLINE POLYKV_TARGET inline __attribute__((always_inline))

namespace polykv::cpu {

namespace {

using Vector = __m256i;
constexpr uint32_t kWidth = 8;
constexpr uint32_t kKeyVectors = 1;
constexpr uint32_t value_vectors(uint32_t rows) {
  return rows <= 2 ? 2 : 1;
}

POLYKV_INLINE Vector load(const uint8_t* bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}
POLYKV_INLINE Vector splat(int byte) {
  return _mm256_set1_epi8(static_cast<char>(byte));
}
POLYKV_INLINE Vector bit_and(Vector a, Vector b) {
  return _mm256_and_si256(a, b);
}
POLYKV_INLINE Vector bit_or(Vector a, Vector b) {
  return _mm256_or_si256(a, b);
}
POLYKV_INLINE Vector bit_xor(Vector a, Vector b) {
  return _mm256_xor_si256(a, b);
}
POLYKV_INLINE Vector shift_left(Vector x, int bits) {
  return _mm256_slli_epi16(x, bits);
}
POLYKV_INLINE Vector shift_right(Vector x, int bits) {
  return _mm256_srli_epi16(x, bits);
}

// Products of int16: levels are widened, numbers have 15 bits and a sign.
constexpr int32_t kLevelBias = 128;
constexpr float kWeightLimit = 32767;
constexpr uint32_t kMostWideDims = 512;
constexpr float query_limit(uint32_t k_head_dim) {
  return k_head_dim <= kMostWideDims ? 32767.0F : 16383.0F;
}
static_assert(128LL * 32767 * kMostWideDims < INT32_MAX && 128LL * 16383 * kMaxHeadDim < INT32_MAX);
static_assert(128LL * 32767 * kBlockTokens < INT32_MAX);

struct Words {
  int32_t first;   // of the lane's bytes 0 and 2
  int32_t second;  // 1 and 3
};
POLYKV_INLINE Words split(int32_t a, int32_t b, int32_t c, int32_t d) {
  return {(a & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(c) << 16),
          (b & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(d) << 16)};
}

template <uint32_t Bits>
struct Levels {
  static constexpr uint32_t kTables = Bits <= 4 ? 1 : 1U << (Bits - 4);
  Vector tables[kTables];

  POLYKV_INLINE Levels() {
    alignas(16) static constexpr auto kBytes = [] {
      std::array<uint8_t, 16 * kTables> bytes{};
      const Codebook& book = codebook(Bits);
      for (uint32_t code = 0; code < bytes.size(); ++code)
        bytes[code] = static_cast<uint8_t>(book.levels[code % book.size] + kLevelBias);
      return bytes;
    }();
    for (uint32_t i = 0; i < kTables; ++i) {
      tables[i] = _mm256_broadcastsi128_si256(
          _mm_load_si128(reinterpret_cast<const __m128i*>(kBytes.data() + size_t{16} * i)));
    }
  }
  /// Of codes in the low or the high nibbles of `x`, whose fifth bits are bit number `bit` of
  /// `upper`, the sixth ones the next.
  POLYKV_INLINE Vector low(Vector x, Vector upper, int bit) const {
    return look_up(bit_and(x, splat(15)), upper, bit);
  }
  POLYKV_INLINE Vector high(Vector x, Vector upper, int bit) const {
    return low(shift_right(x, 4), upper, bit);
  }

 private:
  POLYKV_INLINE Vector look_up(Vector nibbles, Vector upper, int bit) const {
    const Vector first = _mm256_shuffle_epi8(tables[0], nibbles);
    if constexpr (Bits <= 4) {
      return first;
    } else {
      // A blend goes by the bytes' top bits.
      const Vector fifth = shift_left(upper, 7 - bit);
      const Vector below =
          _mm256_blendv_epi8(first, _mm256_shuffle_epi8(tables[1], nibbles), fifth);
      if constexpr (Bits == 5) {
        return below;
      } else {
        const Vector above = _mm256_blendv_epi8(_mm256_shuffle_epi8(tables[2], nibbles),
                                                _mm256_shuffle_epi8(tables[3], nibbles), fifth);
        return _mm256_blendv_epi8(below, above, shift_left(upper, 6 - bit));
      }
    }
  }
};
template <>
struct Levels<8> {};

struct Sums {
  Vector all;
  POLYKV_INLINE Sums() : all(_mm256_setzero_si256()) {}
  POLYKV_INLINE void store(int32_t* out) const {
    _mm256_store_si256(reinterpret_cast<__m256i*>(out), all);
  }
};

/// sums[i][row] += levels[i] x the row's words number `word` and `word` + `apart`.
template <uint32_t Rows, uint32_t Vectors>
POLYKV_INLINE void multiply(const Vector* levels, const int32_t* const* words, uint32_t word,
                            uint32_t apart, Sums (*sums)[Rows]) {
#pragma GCC unroll 2
  for (uint32_t i = 0; i < Vectors; ++i) {
    const Vector even = bit_and(levels[i], _mm256_set1_epi16(0xff));
    const Vector odd = shift_right(levels[i], 8);
#pragma GCC unroll 4
    for (uint32_t row = 0; row < Rows; ++row) {
      const int32_t* first = words[row] + word;
      const Vector evens = _mm256_madd_epi16(even, _mm256_set1_epi32(*first));
      const Vector odds = _mm256_madd_epi16(odd, _mm256_set1_epi32(first[apart]));
      Vector& sum = sums[i][row].all;
      sum = _mm256_add_epi32(sum, _mm256_add_epi32(evens, odds));
      // Keeps the compiler from reordering so far that it runs out of registers (a third slower).
      asm volatile("" : "+x"(sum));
    }
  }
}

#include "kernels/cpu/attend_block.inl"

constexpr AttendOps kOps = {"avx2", kWidth, pack_query, attend_block};

}  // namespace

const AttendOps* avx2_attend_ops() {
  return avx2_ops() == nullptr ? nullptr : &kOps;
}

}  // namespace polykv::cpu

#else

namespace polykv::cpu {
const AttendOps* avx2_attend_ops() {
  return nullptr;
}
}  // namespace polykv::cpu

#endif
