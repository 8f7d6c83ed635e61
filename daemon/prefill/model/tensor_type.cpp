#include "daemon/prefill/model/tensor_type.h"

#include <bit>
#include <cassert>
#include <cstddef>
#include <cstring>

namespace polykv {

namespace {

struct TypeEntry {
  TensorType type;
  const char* name;
  uint32_t block_values;
  uint32_t block_bytes;
};
constexpr TypeEntry kTypes[] = {
    {TensorType::f32, "F32", 1, 4},     {TensorType::f16, "F16", 1, 2},
    {TensorType::bf16, "BF16", 1, 2},   {TensorType::q8_0, "Q8_0", 32, 34},
    {TensorType::q4_0, "Q4_0", 32, 18}, {TensorType::q4_1, "Q4_1", 32, 20},
};

const TypeEntry& entry_of(TensorType type) {
  for (const TypeEntry& entry : kTypes) {
    if (entry.type == type) return entry;
  }
  assert(false && "a TensorType always comes from tensor_type_from_number");
  return kTypes[0];
}

uint16_t load_u16(const uint8_t* bytes) {
  uint16_t value = 0;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

/// IEEE half to float, all values: subnormals, infinities and NaNs as well.
float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000U) << 16;
  const uint32_t exponent = (half >> 10) & 31U;
  const uint32_t mantissa = half & 0x3ffU;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
  return sign != 0 ? -magnitude : magnitude;
}

void dequantise_q8_0(const uint8_t* block, float* target) {
  const float d = half_to_float(load_u16(block));
  for (size_t i = 0; i < 32; ++i) {
    target[i] = d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
  }
}

void dequantise_q4(const uint8_t* codes, float d, float offset_codes, float m, float* target) {
  for (size_t i = 0; i < 16; ++i) {
    target[i] = d * (static_cast<float>(codes[i] & 15U) - offset_codes) + m;
    target[i + 16] = d * (static_cast<float>(codes[i] >> 4) - offset_codes) + m;
  }
}

}  // namespace

std::optional<TensorType> tensor_type_from_number(uint32_t number) {
  for (const TypeEntry& entry : kTypes) {
    if (static_cast<uint32_t>(entry.type) == number) return entry.type;
  }
  return std::nullopt;
}

const char* tensor_type_name(TensorType type) {
  return entry_of(type).name;
}
uint32_t tensor_type_block_values(TensorType type) {
  return entry_of(type).block_values;
}
uint32_t tensor_type_block_bytes(TensorType type) {
  return entry_of(type).block_bytes;
}

void dequantise(TensorType type, std::span<const uint8_t> source, std::span<float> target) {
  const TypeEntry& entry = entry_of(type);
  const size_t block_count = target.size() / entry.block_values;
  assert(target.size() == block_count * entry.block_values);
  assert(source.size() == block_count * entry.block_bytes);
  const uint8_t* block = source.data();
  float* values = target.data();
  if (type == TensorType::f32) {
    if (!target.empty()) std::memcpy(values, block, source.size());
    return;
  }
  for (size_t i = 0; i < block_count;
       ++i, block += entry.block_bytes, values += entry.block_values) {
    switch (type) {
      case TensorType::f32:
        break;
      case TensorType::f16:
        *values = half_to_float(load_u16(block));
        break;
      case TensorType::bf16:
        *values = std::bit_cast<float>(static_cast<uint32_t>(load_u16(block)) << 16);
        break;
      case TensorType::q8_0:
        dequantise_q8_0(block, values);
        break;
      case TensorType::q4_0:
        dequantise_q4(block + 2, half_to_float(load_u16(block)), 8.0F, 0.0F, values);
        break;
      case TensorType::q4_1:
        dequantise_q4(block + 4, half_to_float(load_u16(block)), 0.0F,
                      half_to_float(load_u16(block + 2)), values);
        break;
    }
  }
}

}  // namespace polykv
