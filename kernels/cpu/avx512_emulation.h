// AVX-512 in plain code, for tests on machines without it: SIMDe, and what Debian 12's lacks. Only
// files that are compiled with POLYKV_EMULATE_AVX512 include it.
//
// tests/conformance/avx512_emulation_test.cpp holds what is written here to Intel's description of
// the instructions.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
// Loops that are unrolled give shifts their numbers; clang would refuse that before it unrolls them.
#define SIMDE_NO_CHECK_IMMEDIATE_CONSTANT
#include <simde/x86/avx512/abs.h>
#include <simde/x86/avx512/add.h>
#include <simde/x86/avx512/and.h>
#include <simde/x86/avx512/andnot.h>
#include <simde/x86/avx512/blend.h>
#include <simde/x86/avx512/broadcast.h>
#include <simde/x86/avx512/cast.h>
#include <simde/x86/avx512/cmp.h>
#include <simde/x86/avx512/dpbusd.h>
#include <simde/x86/avx512/extract.h>
#include <simde/x86/avx512/fmadd.h>
#include <simde/x86/avx512/insert.h>
#include <simde/x86/avx512/load.h>
#include <simde/x86/avx512/loadu.h>
#include <simde/x86/avx512/maddubs.h>
#include <simde/x86/avx512/min.h>
#include <simde/x86/avx512/mov.h>
#include <simde/x86/avx512/mul.h>
#include <simde/x86/avx512/or.h>
#include <simde/x86/avx512/permutex2var.h>
#include <simde/x86/avx512/permutexvar.h>
#include <simde/x86/avx512/set1.h>
#include <simde/x86/avx512/setzero.h>
#include <simde/x86/avx512/shuffle.h>
#include <simde/x86/avx512/slli.h>
#include <simde/x86/avx512/srli.h>
#include <simde/x86/avx512/store.h>
#include <simde/x86/avx512/storeu.h>
#include <simde/x86/avx512/sub.h>
#include <simde/x86/avx512/ternarylogic.h>
#include <simde/x86/avx512/unpackhi.h>
#include <simde/x86/avx512/unpacklo.h>
#include <simde/x86/avx512/xor.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/half.h"

// Not shared between files: they may be compiled for different instruction sets.
namespace polykv::emulated {

/// result[i] = of(i), a lane of `To` each.
template <typename To, typename Vector, typename Of>
static inline Vector lanes(Of of) {
  To out[sizeof(Vector) / sizeof(To)];
  for (uint32_t i = 0; i < sizeof(Vector) / sizeof(To); ++i) out[i] = of(i);
  Vector result;
  std::memcpy(&result, out, sizeof result);
  return result;
}
template <typename Lane, typename Vector>
static inline Lane lane(const Vector& x, uint32_t i) {
  Lane out;
  std::memcpy(&out, reinterpret_cast<const char*>(&x) + i * sizeof out, sizeof out);
  return out;
}

static inline __m512 cvtepi32_ps(__m512i x) {
  return lanes<float, __m512>([&](uint32_t i) { return static_cast<float>(lane<int32_t>(x, i)); });
}
static inline __m512i cvtepi8_epi32(__m128i x) {
  return lanes<int32_t, __m512i>([&](uint32_t i) { return int32_t{lane<int8_t>(x, i)}; });
}
static inline __m256i cvtepi32_epi16(__m512i x) {
  return lanes<uint16_t, __m256i>(
      [&](uint32_t i) { return static_cast<uint16_t>(lane<uint32_t>(x, i)); });
}
static inline __m128i cvtepi32_epi8(__m512i x) {
  return lanes<uint8_t, __m128i>(
      [&](uint32_t i) { return static_cast<uint8_t>(lane<uint32_t>(x, i)); });
}
/// Towards zero; what does not fit becomes the least number.
static inline __m512i cvttps_epi32(__m512 x) {
  return lanes<int32_t, __m512i>([&](uint32_t i) {
    const float value = lane<float>(x, i);
    return value >= -0x1p31F && value < 0x1p31F ? static_cast<int32_t>(value) : INT32_MIN;
  });
}
static inline __m512d cvtps_pd(__m256 x) {
  return lanes<double, __m512d>([&](uint32_t i) { return double{lane<float>(x, i)}; });
}
/// To nearest even, which is all that polykv asks for.
static inline __m256i cvtps_ph(__m512 x) {
  return lanes<uint16_t, __m256i>([&](uint32_t i) { return f16_from_f32(lane<float>(x, i)); });
}
static inline __m512i mask_sub_epi16(__m512i otherwise, uint32_t mask, __m512i a, __m512i b) {
  return lanes<uint16_t, __m512i>([&](uint32_t i) {
    const int difference = lane<uint16_t>(a, i) - lane<uint16_t>(b, i);
    return (mask >> i & 1U) != 0 ? static_cast<uint16_t>(difference) : lane<uint16_t>(otherwise, i);
  });
}
/// order: two bits for each of four neighbours, as in the next one.
static inline __m512 permute_ps(__m512 x, uint32_t order) {
  return lanes<float, __m512>(
      [&](uint32_t i) { return lane<float>(x, i / 4 * 4 + (order >> (i % 4 * 2) & 3U)); });
}
static inline __m512i mask_shuffle_epi32(__m512i otherwise, uint32_t mask, __m512i x,
                                         uint32_t order) {
  return lanes<uint32_t, __m512i>([&](uint32_t i) {
    const uint32_t from = i / 4 * 4 + (order >> (i % 4 * 2) & 3U);
    return lane<uint32_t>((mask >> i & 1U) != 0 ? x : otherwise, (mask >> i & 1U) != 0 ? from : i);
  });
}

static inline __m512i maskz_loadu_epi32(uint32_t mask, const void* from) {
  return lanes<uint32_t, __m512i>([&](uint32_t i) {
    uint32_t word = 0;
    if ((mask >> i & 1U) != 0) std::memcpy(&word, static_cast<const char*>(from) + i * 4, 4);
    return word;
  });
}
/// Byte by byte: eight bits of the same eight bytes of x, from that bit on, round to the first again.
/// SIMDe's shifts by 64 where a byte of `from` is 0.
static inline __m512i multishift_epi64_epi8(__m512i from, __m512i x) {
  return lanes<uint8_t, __m512i>([&](uint32_t i) {
    const int bit = lane<uint8_t>(from, i) & 63;
    return static_cast<uint8_t>(std::rotr(lane<uint64_t>(x, i / 8), bit));
  });
}
/// Of the lanes that the mask names.
static inline float mask_reduce_min_ps(uint32_t mask, __m512 x) {
  float least = std::numeric_limits<float>::infinity();
  for (uint32_t i = 0; i < 16; ++i) {
    if ((mask >> i & 1U) != 0) least = std::min(least, lane<float>(x, i));
  }
  return least;
}

}  // namespace polykv::emulated

// Some are macros of a compiler.
#undef _mm512_shuffle_f32x4
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepi32_epi8
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtepi32_epi8
#undef _mm512_cvttps_epi32
#undef _mm512_cvtps_pd
#undef _mm512_permute_ps
#undef _mm512_multishift_epi64_epi8
#undef _mm512_maskz_loadu_epi32
#undef _mm512_mask_reduce_min_ps
#undef _mm512_cvtps_ph
#undef _mm512_mask_sub_epi16
#undef _mm512_mask_shuffle_epi32
#undef _mm512_stream_si512

// SIMDe has it, without this name.
#define _mm512_shuffle_f32x4(a, b, order) simde_mm512_shuffle_f32x4(a, b, order)

#define _mm512_cvtepi32_ps(x) polykv::emulated::cvtepi32_ps(x)
#define _mm512_cvtepi8_epi32(x) polykv::emulated::cvtepi8_epi32(x)
#define _mm512_cvtepi32_epi8(x) polykv::emulated::cvtepi32_epi8(x)
#define _mm512_cvtepi32_epi16(x) polykv::emulated::cvtepi32_epi16(x)
#define _mm512_cvtepi32_epi8(x) polykv::emulated::cvtepi32_epi8(x)
#define _mm512_cvttps_epi32(x) polykv::emulated::cvttps_epi32(x)
#define _mm512_cvtps_pd(x) polykv::emulated::cvtps_pd(x)
#define _mm512_permute_ps(x, order) polykv::emulated::permute_ps(x, order)
#define _mm512_multishift_epi64_epi8(from, x) polykv::emulated::multishift_epi64_epi8(from, x)
#define _mm512_maskz_loadu_epi32(mask, from) polykv::emulated::maskz_loadu_epi32(mask, from)
#define _mm512_mask_reduce_min_ps(mask, x) polykv::emulated::mask_reduce_min_ps(mask, x)
#define _mm512_cvtps_ph(x, rounding) polykv::emulated::cvtps_ph(x)
#define _mm512_mask_sub_epi16(otherwise, mask, a, b) \
  polykv::emulated::mask_sub_epi16(otherwise, mask, a, b)
#define _mm512_mask_shuffle_epi32(otherwise, mask, x, order) \
  polykv::emulated::mask_shuffle_epi32(otherwise, mask, x, static_cast<uint32_t>(order))
#define _mm512_stream_si512(to, x) _mm512_store_si512(to, x)
