// Words of four bytes, fp16 and exponentials: the device's instructions under nvcc, the same results
// in plain C++ elsewhere.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "include/internal/geometry.h"
#include "kernels/cuda/host_device.h"
#include "kernels/half.h"

namespace polykv::cuda {

/// Byte i of the result is byte n of (high, low), n = bits 4 i to 4 i + 2 of the selector; where bit
/// 4 i + 3 is one, eight times that byte's highest bit.
POLYKV_HOST_DEVICE inline uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t nibble = (selector >> (4 * i)) & 15U;
    auto byte = static_cast<uint32_t>((bytes >> (8 * (nibble & 7U))) & 0xffU);
    if (nibble > 7) byte = byte > 127 ? 0xffU : 0;
    result |= byte << (8 * i);
  }
  return result;
#endif
}

/// sum + the products of four int8 each.
POLYKV_HOST_DEVICE inline int32_t dot4(uint32_t a, uint32_t b, int32_t sum) {
#ifdef __CUDA_ARCH__
  return __dp4a(static_cast<int>(a), static_cast<int>(b), sum);
#else
  for (uint32_t i = 0; i < 32; i += 8)
    sum += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return sum;
#endif
}

POLYKV_HOST_DEVICE inline float from_f16(uint16_t value) {
#ifdef __CUDA_ARCH__
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
  return result;
#else
  return f32_from_f16(value);
#endif
}

POLYKV_HOST_DEVICE inline uint16_t to_f16(float value) {
#ifdef __CUDA_ARCH__
  uint16_t result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
#else
  return f16_from_f32(value);
#endif
}

POLYKV_HOST_DEVICE inline float from_bf16(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

POLYKV_HOST_DEVICE inline uint16_t to_bf16(float value) {
#ifdef __CUDA_ARCH__
  uint16_t result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
#else
  return bf16_from_f32(value);
#endif
}

POLYKV_HOST_DEVICE inline float load_element(const void* data, Dtype dtype, int64_t index) {
  if (dtype == Dtype::f32) return static_cast<const float*>(data)[index];
  const uint16_t half = static_cast<const uint16_t*>(data)[index];
  return dtype == Dtype::f16 ? from_f16(half) : from_bf16(half);
}

POLYKV_HOST_DEVICE inline void store_element(void* data, Dtype dtype, int64_t index, float value) {
  if (dtype == Dtype::f32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] = dtype == Dtype::f16 ? to_f16(value) : to_bf16(value);
  }
}

/// Four bytes; the address is a multiple of 4.
POLYKV_HOST_DEVICE inline uint32_t load_word(const uint8_t* bytes) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const uint32_t*>(bytes);
#else
  uint32_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
#endif
}

POLYKV_HOST_DEVICE inline int32_t signed_byte(uint32_t word, uint32_t index) {
  return static_cast<int8_t>(word >> (8 * index));
}

}  // namespace polykv::cuda
