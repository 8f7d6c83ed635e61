#include "kernels/half.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/cpu/ops.h"

using namespace polykv;

TEST_CASE("every fp16 and bf16 value survives the way through fp32") {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if (!std::isnan(f32_from_f16(half))) REQUIRE(f16_from_f32(f32_from_f16(half)) == half);
    if (!std::isnan(f32_from_bf16(half))) REQUIRE(bf16_from_f32(f32_from_bf16(half)) == half);
  }
  CHECK(f32_from_f16(0x3c00) == 1.0F);
  CHECK(f32_from_f16(0x0001) == 0x1p-24F);
  CHECK(f32_from_f16(0x7bff) == 65504.0F);
  CHECK(std::isinf(f32_from_f16(0x7c00)));
  CHECK(f32_from_bf16(0x3f80) == 1.0F);
}

TEST_CASE("conversions round to the nearest, ties to even") {
  CHECK(f16_from_f32(1.0F + 0x1p-11F) == 0x3c00);
  CHECK(f16_from_f32(1.0F + 0x1.8p-10F) == 0x3c02);
  CHECK(f16_from_f32(std::nextafter(1.0F + 0x1p-11F, 2.0F)) == 0x3c01);
  CHECK(f16_from_f32(0x1p-25F) == 0);
  CHECK(f16_from_f32(0x1.8p-24F) == 2);
  CHECK(f16_from_f32(65519.9F) == 0x7bff);
  CHECK(f16_from_f32(65520.0F) == 0x7c00);
  CHECK(f16_from_f32(-1e30F) == 0xfc00);
  CHECK(std::isnan(f32_from_f16(f16_from_f32(std::nanf("")))));
  CHECK(bf16_from_f32(1.0F + 0x1p-8F) == 0x3f80);
  CHECK(bf16_from_f32(1.0F + 0x1.8p-7F) == 0x3f82);
  CHECK(std::isnan(f32_from_bf16(bf16_from_f32(std::nanf("")))));
}

TEST_CASE("every instruction set converts as the software does, whatever the count") {
  std::mt19937 engine(11);
  std::vector<float> values(1003);
  for (float& value : values) {
    uint32_t bits = engine();
    if ((bits & 0x7f800000U) == 0x7f800000U) bits &= ~0x00800000U;     // finite
    if (engine() % 2 == 0) bits = (bits & 0x87ffffffU) | 0x38000000U;  // in the range of fp16
    std::memcpy(&value, &bits, sizeof value);
  }
  for (const cpu::Ops* ops : {&cpu::baseline_ops(), cpu::avx2_ops()}) {
    if (ops == nullptr) continue;
    for (const size_t count :
         {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{9}, values.size()}) {
      std::vector<uint16_t> half(count + 1, 0xabcd);
      std::vector<float> back(count + 1, 5.0F);
      ops->f16_from_f32(values.data(), half.data(), count);
      for (size_t i = 0; i < count; ++i) REQUIRE(half[i] == f16_from_f32(values[i]));
      ops->f32_from_f16(half.data(), back.data(), count);
      for (size_t i = 0; i < count; ++i) REQUIRE(back[i] == f32_from_f16(half[i]));
      ops->bf16_from_f32(values.data(), half.data(), count);
      for (size_t i = 0; i < count; ++i) REQUIRE(half[i] == bf16_from_f32(values[i]));
      ops->f32_from_bf16(half.data(), back.data(), count);
      for (size_t i = 0; i < count; ++i) REQUIRE(back[i] == f32_from_bf16(half[i]));
      CHECK(half[count] == 0xabcd);
      CHECK(back[count] == 5.0F);
    }
  }
}
