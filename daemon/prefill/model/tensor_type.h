// The element types of GGUF tensors that polykv reads, their sizes, and how they become fp32.
//
//   type   block                            bytes per 32 values
//   F32    value                            128
//   F16    IEEE half                        64
//   BF16   upper half of an fp32            64
//   Q8_0   [f16 d][32 x int8 q]             34      x = d * q
//   Q4_0   [f16 d][16 bytes]                18      x = d * (q - 8)
//   Q4_1   [f16 d][f16 m][16 bytes]         20      x = d * q + m
//
// In the 4-bit types the low nibbles of the 16 bytes are values 0..15 of the block, the high
// nibbles 16..31.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace polykv {

/// The numbers are those of the file format.
enum class TensorType : uint32_t { f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q8_0 = 8, bf16 = 30 };

std::optional<TensorType> tensor_type_from_number(uint32_t number);  // nullopt: not supported
const char* tensor_type_name(TensorType type);                       // "F32", "Q4_1", ...
uint32_t tensor_type_block_values(TensorType type);  // 1 or 32; a row holds whole blocks
uint32_t tensor_type_block_bytes(TensorType type);

/// Dequantises whole blocks. source.size() is a multiple of the block's bytes; target.size() the
/// matching value count. Pure, thread-safe.
void dequantise(TensorType type, std::span<const uint8_t> source, std::span<float> target);

}  // namespace polykv
