// What kernels/cpu/avx512_emulation.h has in place of instructions, against Intel's description of
// them.
#include "kernels/cpu/avx512_emulation.h"

#include <array>
#include <catch2/catch.hpp>
#include <cmath>

namespace {

template <typename Lane, typename Vector>
auto lanes_of(const Vector& x) {
  std::array<Lane, sizeof(Vector) / sizeof(Lane)> out;
  std::memcpy(out.data(), &x, sizeof x);
  return out;
}
template <typename Vector, typename Lane, size_t Count>
Vector vector_of(const std::array<Lane, Count>& lanes) {
  static_assert(sizeof(Vector) == sizeof lanes);
  Vector out;
  std::memcpy(&out, lanes.data(), sizeof out);
  return out;
}

}  // namespace

TEST_CASE("conversions of numbers") {
  std::array<int32_t, 16> numbers{0, 1, -1, 65536, -65536, 0x7fff0000, -0x7fff0000, 16777217};
  const auto floats = lanes_of<float>(_mm512_cvtepi32_ps(vector_of<__m512i>(numbers)));
  CHECK(floats[4] == -65536.0F);
  CHECK(floats[5] == 2147418112.0F);
  CHECK(floats[7] == 16777216.0F);  // to nearest even
  std::array<int8_t, 16> bytes{0, 127, -128, -1};
  const auto wide = lanes_of<int32_t>(_mm512_cvtepi8_epi32(vector_of<__m128i>(bytes)));
  CHECK((wide[1] == 127 && wide[2] == -128 && wide[3] == -1 && wide[15] == 0));
  numbers[1] = 0x12345678;
  const auto narrow = lanes_of<uint16_t>(_mm512_cvtepi32_epi16(vector_of<__m512i>(numbers)));
  CHECK((narrow[1] == 0x5678 && narrow[2] == 0xffff));  // the lower half, not saturated
}

TEST_CASE("narrowing to bytes keeps the low one, floats become integers towards zero") {
  std::array<int32_t, 16> numbers{0x12345678, -1, 256, 127, -128};
  const auto bytes = lanes_of<uint8_t>(_mm512_cvtepi32_epi8(vector_of<__m512i>(numbers)));
  CHECK((bytes[0] == 0x78 && bytes[1] == 0xff && bytes[2] == 0 && bytes[4] == 0x80));
  const std::array<float, 16> values{1.9F, -1.9F, 0x1p31F, -0x1p31F, 8388609};
  const auto whole = lanes_of<int32_t>(_mm512_cvttps_epi32(vector_of<__m512>(values)));
  CHECK((whole[0] == 1 && whole[1] == -1 && whole[2] == INT32_MIN && whole[3] == INT32_MIN));
  CHECK(whole[4] == 8388609);
}

TEST_CASE("bytes from any bit of eight bytes on") {
  std::array<uint64_t, 8> x{};
  std::array<uint8_t, 64> from{};
  x.fill(0x8877665544332211U);
  from[0] = 0;
  from[1] = 8;
  from[2] = 60;   // the last four bits, then the first four
  from[3] = 204;  // only 204 % 64 = 12 counts
  x[1] = 1;
  from[8] = 63;
  const auto bytes = lanes_of<uint8_t>(
      _mm512_multishift_epi64_epi8(vector_of<__m512i>(from), vector_of<__m512i>(x)));
  CHECK((bytes[0] == 0x11 && bytes[1] == 0x22 && bytes[2] == 0x18 && bytes[3] == 0x32));
  CHECK((bytes[8] == 2 && bytes[9] == 1 && bytes[63] == 0x11));
}

TEST_CASE("a load with a mask reads only what the mask names") {
  const std::vector<uint32_t> two{7, 8};  // the address sanitizer would see a third being read
  const auto words = lanes_of<uint32_t>(_mm512_maskz_loadu_epi32(2, two.data()));
  CHECK((words[0] == 0 && words[1] == 8 && words[2] == 0 && words[15] == 0));
}

TEST_CASE("floats to doubles, shuffled, and the least of some") {
  std::array<float, 8> eight{};
  std::array<float, 16> values{};
  for (uint32_t i = 0; i < 16; ++i) values[i] = static_cast<float>(i) - 4;
  for (uint32_t i = 0; i < 8; ++i) eight[i] = 0.1F * static_cast<float>(i);
  const auto doubles = lanes_of<double>(_mm512_cvtps_pd(vector_of<__m256>(eight)));
  for (uint32_t i = 0; i < 8; ++i) CHECK(doubles[i] == double{eight[i]});
  // 0xb1: numbers 1, 0, 3, 2 of each four.
  const auto turned = lanes_of<float>(_mm512_permute_ps(vector_of<__m512>(values), 0xb1));
  for (uint32_t i = 0; i < 16; ++i) CHECK(turned[i] == values[i ^ 1]);
  CHECK(_mm512_mask_reduce_min_ps(0xfffe, vector_of<__m512>(values)) == -3);
  CHECK(_mm512_mask_reduce_min_ps(0x8000, vector_of<__m512>(values)) == 11);
}

TEST_CASE("floats to fp16, to nearest even") {
  const std::array<float, 16> values{1,     -2,       65504,    65519.9F,
                                     65520, 0x1p-24F, 0x1p-25F, 1.00048828125F};
  const auto halves = lanes_of<uint16_t>(_mm512_cvtps_ph(vector_of<__m512>(values), 0));
  const uint16_t want[] = {0x3c00, 0xc000, 0x7bff, 0x7bff, 0x7c00, 1, 0, 0x3c00};
  CHECK(std::equal(std::begin(want), std::end(want), halves.begin()));
}

TEST_CASE("differences and shuffles where a mask says so") {
  std::array<uint16_t, 32> a{};
  std::array<uint16_t, 32> b{};
  std::array<uint16_t, 32> otherwise{};
  for (uint16_t i = 0; i < 32; ++i) {
    a[i] = i;
    b[i] = static_cast<uint16_t>(3 * i);
    otherwise[i] = static_cast<uint16_t>(1000 + i);
  }
  const auto differences = lanes_of<uint16_t>(_mm512_mask_sub_epi16(
      vector_of<__m512i>(otherwise), 0x80000002U, vector_of<__m512i>(a), vector_of<__m512i>(b)));
  CHECK((differences[0] == 1000 && differences[1] == 0xfffe && differences[30] == 1030));
  CHECK(differences[31] == 0x10000 - 62);
  std::array<uint32_t, 16> x{};
  std::array<uint32_t, 16> y{};
  for (uint32_t i = 0; i < 16; ++i) {
    x[i] = i;
    y[i] = 100 + i;
  }
  // 0xa0: numbers 0, 0, 2, 2 of each four.
  const auto shuffled = lanes_of<uint32_t>(
      _mm512_mask_shuffle_epi32(vector_of<__m512i>(y), 0xaaaa, vector_of<__m512i>(x), 0xa0));
  CHECK((shuffled[0] == 100 && shuffled[1] == 0 && shuffled[2] == 102 && shuffled[3] == 2));
  CHECK((shuffled[12] == 112 && shuffled[13] == 12 && shuffled[15] == 14));
}
