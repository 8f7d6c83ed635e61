// Writes small GGUF files, whole or broken on purpose, and puts them into memfds. Tests only: throws std::runtime_error.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/fd.h"

namespace polykv::test {

template <typename T>
std::string little_endian(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

inline std::string gguf_string(const std::string& text) {
  return little_endian<uint64_t>(text.size()) + text;
}

/// Fields that a test can make lie are plain members.
class GgufBuilder {
 public:
  struct Tensor {
    std::string name;
    uint32_t type = 0;
    std::vector<uint64_t> dimensions;
    std::string data;
    uint64_t offset = 0;  // set by build() unless keep_offset
    bool keep_offset = false;
  };

  uint32_t version = 3;
  uint64_t alignment = 32;
  std::string magic = "GGUF";
  std::map<std::string, std::string> metadata;  // key -> value type and value, as in the file
  std::vector<Tensor> tensors;
  uint64_t tensor_count_extra = 0;
  uint64_t metadata_count_extra = 0;
  size_t head_bytes = 0;          // set by build(): up to the tensor table's end
  size_t tensor_table_begin = 0;  // set by build()

  void set_u32(const std::string& key, uint32_t value) {
    metadata[key] = little_endian<uint32_t>(4) + little_endian(value);
  }
  void set_f32(const std::string& key, float value) {
    metadata[key] = little_endian<uint32_t>(6) + little_endian(value);
  }
  void set_bool(const std::string& key, uint8_t value) {
    metadata[key] = little_endian<uint32_t>(7) + little_endian(value);
  }
  void set_string(const std::string& key, const std::string& value) {
    metadata[key] = little_endian<uint32_t>(8) + gguf_string(value);
  }
  void set_strings(const std::string& key, const std::vector<std::string>& values) {
    std::string bytes = little_endian<uint32_t>(9) + little_endian<uint32_t>(8) +
                        little_endian<uint64_t>(values.size());
    for (const std::string& value : values) bytes += gguf_string(value);
    metadata[key] = bytes;
  }
  void set_i32s(const std::string& key, const std::vector<int32_t>& values) {
    std::string bytes = little_endian<uint32_t>(9) + little_endian<uint32_t>(5) +
                        little_endian<uint64_t>(values.size());
    for (const int32_t value : values) bytes += little_endian(value);
    metadata[key] = bytes;
  }
  Tensor& tensor(const std::string& name) {
    for (Tensor& item : tensors) {
      if (item.name == name) return item;
    }
    throw std::runtime_error("no tensor " + name);
  }

  std::string build() {
    std::string file = magic + little_endian(version) +
                       little_endian<uint64_t>(tensors.size() + tensor_count_extra) +
                       little_endian<uint64_t>(metadata.size() + metadata_count_extra);
    for (const auto& [key, value] : metadata) file += gguf_string(key) + value;
    tensor_table_begin = file.size();
    uint64_t offset = 0;
    for (Tensor& item : tensors) {
      if (!item.keep_offset) item.offset = offset;
      offset += (item.data.size() + alignment - 1) / alignment * alignment;
      file += gguf_string(item.name) +
              little_endian<uint32_t>(static_cast<uint32_t>(item.dimensions.size()));
      for (const uint64_t dimension : item.dimensions) file += little_endian(dimension);
      file += little_endian(item.type) + little_endian(item.offset);
    }
    head_bytes = file.size();
    for (const Tensor& item : tensors) {
      file.resize((file.size() + alignment - 1) / alignment * alignment);
      file += item.data;
    }
    return file;
  }
};

/// Bytes of `value_count` random values of a GGUF tensor type, scales kept small and finite.
inline std::string random_tensor_data(uint32_t type, uint64_t value_count, std::mt19937& random) {
  struct Shape {
    uint64_t values, scale_count, code_bytes;
  };
  static const std::map<uint32_t, Shape> kBlocks = {
      {2, {32, 1, 16}}, {3, {32, 2, 16}}, {8, {32, 1, 32}}};
  std::string data;
  std::normal_distribution<float> normal(0.0F, 0.05F);
  if (const auto block = kBlocks.find(type); block != kBlocks.end()) {
    const Shape& shape = block->second;
    for (uint64_t i = 0; i < value_count / shape.values; ++i) {
      // Halves between 2^-8 and 2^-6, either sign.
      for (uint64_t s = 0; s < shape.scale_count; ++s) {
        data += little_endian(
            static_cast<uint16_t>(0x1c00U + random() % 0x800U + (random() % 2) * 0x8000U));
      }
      for (uint64_t b = 0; b < shape.code_bytes; ++b) data += static_cast<char>(random());
    }
    return data;
  }
  for (uint64_t i = 0; i < value_count; ++i) {
    const float value = normal(random);
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    if (type == 0) data += little_endian(bits);
    if (type == 30) data += little_endian(static_cast<uint16_t>(bits >> 16));
    if (type == 1)
      data += little_endian(
          static_cast<uint16_t>(0x2400U + random() % 0x800U + (random() % 2) * 0x8000U));
  }
  return data;
}

/// GPT-2's printable character for a byte, in UTF-8.
inline std::string byte_level_character(uint8_t byte) {
  static const std::vector<uint32_t> kCharacters = [] {
    std::vector<uint32_t> characters(256);
    uint32_t next = 0x100;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool itself = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      characters[b] = itself ? b : next++;
    }
    return characters;
  }();
  const uint32_t character = kCharacters[byte];
  if (character < 0x80) return {static_cast<char>(character)};
  return {static_cast<char>(0xc0U | character >> 6),
          static_cast<char>(0x80U | (character & 0x3fU))};
}

/// A Llama model with random weights: 2 layers, 4 heads, 2 kv_heads, head_dim 16, every tensor type, an untied output, a
/// byte-level vocabulary of 263 tokens ("<|endoftext|>", "<|im_start|>", "<|im_end|>", the bytes, "he", "ll", "hell",
/// "hello") and a ChatML template. About 150 KB.
inline GgufBuilder tiny_llama(uint32_t seed = 1) {
  GgufBuilder file;
  file.set_string("general.architecture", "llama");
  file.set_string("general.name", "tiny");
  file.set_u32("general.alignment", 32);
  file.set_u32("llama.block_count", 2);
  file.set_u32("llama.context_length", 512);
  file.set_u32("llama.embedding_length", 64);
  file.set_u32("llama.feed_forward_length", 96);
  file.set_u32("llama.attention.head_count", 4);
  file.set_u32("llama.attention.head_count_kv", 2);
  file.set_u32("llama.rope.dimension_count", 16);
  file.set_f32("llama.rope.freq_base", 10000.0F);
  file.set_f32("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  file.set_string("tokenizer.ggml.model", "gpt2");
  file.set_string("tokenizer.ggml.pre", "smollm");
  std::vector<std::string> tokens = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
  std::vector<int32_t> kinds(3, 3);
  for (uint32_t byte = 0; byte < 256; ++byte)
    tokens.push_back(byte_level_character(static_cast<uint8_t>(byte)));
  for (const char* merged : {"he", "ll", "hell", "hello"}) tokens.emplace_back(merged);
  kinds.resize(tokens.size(), 1);
  file.set_u32("llama.vocab_size", static_cast<uint32_t>(tokens.size()));
  file.set_strings("tokenizer.ggml.tokens", tokens);
  file.set_i32s("tokenizer.ggml.token_type", kinds);
  file.set_strings("tokenizer.ggml.merges", {"h e", "l l", "he ll", "hell o"});
  file.set_u32("tokenizer.ggml.bos_token_id", 1);
  file.set_u32("tokenizer.ggml.eos_token_id", 2);
  file.set_string("tokenizer.chat_template",
                  "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
                  "message['content'] + "
                  "'<|im_end|>' + '\n'}}{% endfor %}{{ '<|im_start|>assistant\n' }}");

  std::mt19937 random(seed);
  const auto add = [&](const std::string& name, uint32_t type, uint64_t rows, uint64_t columns) {
    std::vector<uint64_t> dimensions = {columns};
    if (rows != 0) dimensions.push_back(rows);
    file.tensors.push_back({name, type, dimensions,
                            random_tensor_data(type, columns * (rows == 0 ? 1 : rows), random), 0,
                            false});
  };
  add("token_embd.weight", 8, tokens.size(), 64);
  for (int i = 0; i < 2; ++i) {
    const std::string prefix = "blk." + std::to_string(i) + ".";
    add(prefix + "attn_norm.weight", 0, 0, 64);
    add(prefix + "attn_q.weight", 2, 64, 64);
    add(prefix + "attn_k.weight", 3, 32, 64);
    add(prefix + "attn_v.weight", 1, 32, 64);
    add(prefix + "attn_output.weight", 30, 64, 64);
    add(prefix + "ffn_norm.weight", 0, 0, 64);
    add(prefix + "ffn_gate.weight", 0, 96, 64);
    add(prefix + "ffn_up.weight", 8, 96, 64);
    add(prefix + "ffn_down.weight", 3, 64, 96);
  }
  add("output_norm.weight", 0, 0, 64);
  add("output.weight", 30, tokens.size(), 64);
  return file;
}

/// A memfd that holds these bytes.
inline UniqueFd memfd_of(const std::string& bytes) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  if (!fd) throw std::runtime_error("memfd_create failed");
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = write(fd.get(), bytes.data() + done, bytes.size() - done);
    if (count <= 0) throw std::runtime_error("write to a memfd failed");
    done += static_cast<size_t>(count);
  }
  return fd;
}

}  // namespace polykv::test
