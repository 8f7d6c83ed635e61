// What a run of polykv_bench measures.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "include/internal/geometry.h"

namespace polykv::bench {

struct Options {
  std::vector<std::string> codecs = {"k5v4"};
  std::vector<std::string> dtypes = {"f16"};
  std::vector<uint32_t> head_dims = {128};
  std::vector<uint32_t> groups = {1, 4};
  std::vector<uint32_t> query_rows = {1};
  std::vector<uint32_t> threads = {1};
  uint64_t tokens = 8192;
  uint32_t kv_heads = 8;
  uint32_t layers = 0;  // 0: as many as make `mib` of packed bytes
  uint32_t mib = 256;
  uint32_t memory_mib = 256;  // of each buffer that the memory is measured with
  uint32_t rounds = 7;
  bool head_major = false;   // targets of decode: [kv_head, token, dim]
  uint32_t attaches = 1000;  // of attach
  std::string peers_path;    // JSON of scripts/bench-peers
  size_t memory_bytes() const { return size_t{memory_mib} << 20; }
  bool as_json = false;
  bool cpu_time = false;
  bool spoils = false;  // alters what is verified, to show that verification can fail
};

/// One document of a run; every layer has the same geometry.
struct Shape {
  Profile profile = Profile::k5v4;
  uint32_t head_dim = 0;  // of K and V
  uint32_t kv_heads = 0;
  uint32_t layers = 0;
  uint64_t tokens = 0;

  LayerGeometry geometry() const { return {kv_heads, head_dim, head_dim, 0}; }
  /// Tokens of all layers and kv_heads.
  double rows() const {
    return static_cast<double>(layers) * static_cast<double>(tokens) * kv_heads;
  }
  /// K and V.
  double values() const { return rows() * 2 * head_dim; }
};

}  // namespace polykv::bench
