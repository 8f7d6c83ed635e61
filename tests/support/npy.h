// Reads the .npy files of tests/data: little-endian, C order, format version 1. Throws
// std::runtime_error (tests only).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace polykv::test {

template <typename T>
struct NpyArray {
  std::vector<size_t> shape;
  std::vector<T> values;
};

/// T must be of the file's element size and kind: the descriptor, for example "<f4", is compared.
template <typename T>
NpyArray<T> load_npy(const std::string& path, const std::string& descriptor) {
  std::ifstream file(path, std::ios::binary);
  char magic[8];
  uint8_t header_size[2];
  if (!file.read(magic, 8) || !file.read(reinterpret_cast<char*>(header_size), 2) ||
      magic[6] != 1) {
    throw std::runtime_error(path + ": not an npy file of version 1");
  }
  std::string header(header_size[0] + 256U * header_size[1], ' ');
  file.read(header.data(), static_cast<std::streamsize>(header.size()));
  if (header.find("'" + descriptor + "'") == std::string::npos ||
      header.find("False") == std::string::npos) {
    throw std::runtime_error(path + ": expected C order and " + descriptor + ", found " + header);
  }
  NpyArray<T> array;
  size_t count = 1;
  const char* cursor = header.c_str() + header.find('(') + 1;
  while (*cursor != ')') {
    char* end = nullptr;
    const size_t dimension = std::strtoul(cursor, &end, 10);
    if (end != cursor) {
      array.shape.push_back(dimension);
      count *= dimension;
    }
    cursor = end + (*end == ',' || *end == ' ' ? 1 : 0);
  }
  array.values.resize(count);
  if (!file.read(reinterpret_cast<char*>(array.values.data()),
                 static_cast<std::streamsize>(count * sizeof(T)))) {
    throw std::runtime_error(path + ": shorter than its header says");
  }
  return array;
}

}  // namespace polykv::test
