// Decoding of K or V of a token range: one thread block for each block of 64 tokens of a kv_head.
//
//   codes (global) --unpack--> tile[token][dim] of levels (shared)
//                   K: a thread has 16 dims of a token, transforms them before it stores them
//                   V: a thread has 32 tokens of a dim; the 16 dims are transformed in a second step
//   tile --a thread takes dim j of every piece of 16 dims of a token, transforms across pieces--> target
//
// Levels and their sums are integers up to 108 * 256, so the tile is int16: 16 KiB at a head_dim of 128.
// paper-k8v3's V has real levels: its tile is fp32, of half the tokens at a time.
//
// Bytes per token, kv_head and dim: bits / 8 read, the target's element written. Values are those
// of the reference within fp32's rounding (1e-6 of a tensor's norm).
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/tensor_arguments.h"
#include "kernels/cuda/thread.h"

namespace polykv::cuda {

/// Where decoded values go: those of kv_head h, token t of the segment, dim d to
/// data[h * strides.head + (t - first_token) * strides.token + d * strides.dim].
struct DecodeRange {
  void* data;
  Dtype dtype;
  Strides strides;
  uint64_t first_token;
  uint64_t token_count;
  uint64_t first_block;
  uint64_t block_count;

  POLYKV_HOST_DEVICE bool holds(uint64_t token) const {
    return token >= first_token && token - first_token < token_count;
  }
  POLYKV_HOST_DEVICE void put(uint32_t kv_head, uint64_t token, uint32_t dim, float value) const {
    store_element(data, dtype,
                  strides.head * kv_head +
                      strides.token * static_cast<int64_t>(token - first_token) + strides.dim * dim,
                  value);
  }
  /// Whether neighbouring tokens are nearer to each other than neighbouring dims.
  POLYKV_HOST_DEVICE bool is_transposed() const {
    const int64_t token = strides.token < 0 ? -strides.token : strides.token;
    const int64_t dim = strides.dim < 0 ? -strides.dim : strides.dim;
    return token < dim;
  }
};

struct DecodeArguments {
  PackedTensor tensor;
  ExactRows exact;
  DecodeRange range;
  float real_levels[8];  // of paper-k8v3's V, whose table of levels is the codes themselves
};

/// Element: of the tile, int16_t or float.
template <typename Element>
struct DecodeKernel {
  using Arguments = DecodeArguments;
  static constexpr uint32_t kThreads = 256;
  static constexpr uint32_t kMinBlocks = 3;
  static constexpr bool kIsReal = std::is_same_v<Element, float>;
  static constexpr uint32_t kPassTokens = kIsReal ? 32 : 64;
  // An odd number of words from row to row, so that a column lies in all banks.
  static constexpr uint32_t kMaxPitch = kMaxDeviceHeadDim + 2;
  enum Sync : uint32_t { kUnpacked = 1, kPiecesDone, kPassDone, kAllStored };

  struct Shared {
    float gains[kBlockTokens];
    Element tile[kPassTokens * kMaxPitch];
  };

  struct Block {
    const Arguments& a;
    Shared& shared;
    const uint8_t* bytes;
    uint32_t kv_head;
    uint64_t index;
    uint32_t thread;
    uint32_t pass_token;  // the pass's first, in the block

    POLYKV_HOST_DEVICE uint32_t pitch() const {
      return kIsReal ? a.tensor.head_dim | 1U : ((a.tensor.head_dim + 1) / 2 | 1U) * 2;
    }
    POLYKV_HOST_DEVICE Element* row(uint32_t token) const { return shared.tile + token * pitch(); }
  };

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    Block block{a, cuda.template shared<Shared>(), nullptr, 0, 0, cuda.thread_index(), 0};
    block.kv_head = static_cast<uint32_t>(cuda.block_index() / a.range.block_count);
    block.index = a.range.first_block + cuda.block_index() % a.range.block_count;
    block.bytes = a.tensor.block(block.kv_head, block.index);
    if (block.thread < kBlockTokens)
      block.shared.gains[block.thread] = a.tensor.gain(block.bytes, block.thread);
    for (; block.pass_token < kBlockTokens; block.pass_token += kPassTokens) {
      unpack(block);
      cuda.sync_threads(kUnpacked);
      if (a.tensor.is_rotated && !a.tensor.is_k) {
        transform_rows(block);
        cuda.sync_threads(kPiecesDone);
      }
      store(block);
      if (kPassTokens < kBlockTokens) cuda.sync_threads(kPassDone);
    }
    cuda.sync_threads(kAllStored);
    store_exact_rows(block);
  }

 private:
  POLYKV_HOST_DEVICE static void unpack(const Block& block) {
    if constexpr (kIsReal) {
      unpack_v<3>(block);
    } else if (block.a.tensor.is_k) {
      switch (block.a.tensor.bits) {
        case 4:
          return unpack_k<4>(block);
        case 5:
          return unpack_k<5>(block);
        case 6:
          return unpack_k<6>(block);
        default:
          return unpack_k8(block);
      }
    } else {
      switch (block.a.tensor.bits) {
        case 3:
          return unpack_v<3>(block);
        case 4:
          return unpack_v<4>(block);
        case 5:
          return unpack_v<5>(block);
        default:
          return unpack_v8(block);
      }
    }
  }

  template <uint32_t Bits>
  POLYKV_HOST_DEVICE static void unpack_k(const Block& block) {
    const PackedTensor& tensor = block.a.tensor;
    const uint32_t tasks = kBlockTokens * (tensor.head_dim / kPieceDims);
    for (uint32_t task = block.thread; task < tasks; task += kThreads) {
      const uint32_t token = task % kBlockTokens;
      const uint32_t dim = task / kBlockTokens * kPieceDims;
      const auto piece =
          KPiece<Bits>::load(block.bytes + tensor.codes, token, dim, tensor.head_dim);
      int32_t values[kPieceDims];
      POLYKV_UNROLL
      for (uint32_t half = 0; half < 2; ++half) {
        const LevelPair pair = piece.levels(tensor.levels, half);
        POLYKV_UNROLL
        for (uint32_t byte = 0; byte < 4; ++byte) {
          values[8 * half + interleaved_dim(0, byte)] = signed_byte(pair.first, byte);
          values[8 * half + interleaved_dim(1, byte)] = signed_byte(pair.second, byte);
        }
      }
      hadamard<kPieceDims>(values);
      POLYKV_UNROLL
      for (uint32_t i = 0; i < kPieceDims; ++i)
        block.row(token)[dim + i] = static_cast<Element>(values[i]);
    }
  }

  POLYKV_HOST_DEVICE static void unpack_k8(const Block& block) {
    const PackedTensor& tensor = block.a.tensor;
    const uint32_t tasks = kBlockTokens * (tensor.head_dim / 4);
    for (uint32_t task = block.thread; task < tasks; task += kThreads) {
      const uint32_t word = load_word(block.bytes + tensor.codes + task * 4) ^ 0x80808080U;
      POLYKV_UNROLL
      for (uint32_t byte = 0; byte < 4; ++byte) {
        block.row(task % kBlockTokens)[task / kBlockTokens * 4 + byte] =
            static_cast<Element>(signed_byte(word, byte));
      }
    }
  }

  /// Four tokens of a quad.
  POLYKV_HOST_DEVICE static void put_quad(const Block& block, uint32_t quad, uint32_t dim,
                                          uint32_t levels) {
    POLYKV_UNROLL
    for (uint32_t lane = 0; lane < 4; ++lane) {
      const uint32_t token = quad + (lane % 2 * 2 + lane / 2) * kTokenQuads;
      const int32_t level = signed_byte(levels, lane);
      if constexpr (kIsReal) {
        if (token - block.pass_token < kPassTokens)
          block.row(token - block.pass_token)[dim] = block.a.real_levels[level];
      } else {
        block.row(token)[dim] = static_cast<Element>(level);
      }
    }
  }

  template <uint32_t Bits>
  POLYKV_HOST_DEVICE static void unpack_v(const Block& block) {
    const PackedTensor& tensor = block.a.tensor;
    for (uint32_t task = block.thread; task < 2 * tensor.head_dim; task += kThreads) {
      const uint32_t dim = task % tensor.head_dim;
      const uint32_t group = task / tensor.head_dim;
      const auto packed =
          VGroup<Bits>::load(block.bytes + tensor.codes, group, dim, tensor.head_dim);
      POLYKV_UNROLL
      for (uint32_t pair = 0; pair < kGroupQuads / 2; ++pair) {
        const LevelPair levels = packed.levels(tensor.levels, pair);
        const uint32_t quad = group * kGroupQuads + 2 * pair;
        put_quad(block, quad, dim, byte_perm(levels.first, levels.second, 0x6420U));
        put_quad(block, quad + 1, dim, byte_perm(levels.first, levels.second, 0x7531U));
      }
    }
  }

  POLYKV_HOST_DEVICE static void unpack_v8(const Block& block) {
    const PackedTensor& tensor = block.a.tensor;
    for (uint32_t task = block.thread; task < kTokenQuads * tensor.head_dim; task += kThreads) {
      put_quad(block, task / tensor.head_dim, task % tensor.head_dim,
               load_word(block.bytes + tensor.codes + task * 4));
    }
  }

  /// Each piece of 16 dims.
  POLYKV_HOST_DEVICE static void transform_rows(const Block& block) {
    using Sum = std::conditional_t<kIsReal, float, int32_t>;
    const uint32_t tasks = kPassTokens * (block.a.tensor.head_dim / kPieceDims);
    for (uint32_t task = block.thread; task < tasks; task += kThreads) {
      Element* piece = block.row(task % kPassTokens) + task / kPassTokens * kPieceDims;
      Sum values[kPieceDims];
      POLYKV_UNROLL
      for (uint32_t i = 0; i < kPieceDims; ++i) values[i] = piece[i];
      hadamard<kPieceDims>(values);
      POLYKV_UNROLL
      for (uint32_t i = 0; i < kPieceDims; ++i) piece[i] = static_cast<Element>(values[i]);
    }
  }

  POLYKV_HOST_DEVICE static void store(const Block& block) {
    const DecodeRange& range = block.a.range;
    const bool is_transposed = range.is_transposed();
    for (uint32_t task = block.thread; task < kPassTokens * kPieceDims; task += kThreads) {
      const uint32_t row = is_transposed ? task % kPassTokens : task / kPieceDims;
      const uint32_t column = is_transposed ? task / kPassTokens : task % kPieceDims;
      if (range.holds(block.index * kBlockTokens + block.pass_token + row))
        store_column(block, row, column);
    }
  }

  /// Dim `column` of every piece of a row.
  POLYKV_HOST_DEVICE static void store_column(const Block& block, uint32_t row, uint32_t column) {
    const PackedTensor& tensor = block.a.tensor;
    const Element* levels = block.row(row);
    const float gain = block.shared.gains[block.pass_token + row];
    const uint64_t token = block.index * kBlockTokens + block.pass_token + row;
    float values[kMaxPieces];
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kMaxPieces; ++i) {
      const uint32_t dim = column + i * kPieceDims;
      values[i] = dim < tensor.head_dim ? static_cast<float>(levels[dim]) : 0.0F;
    }
    if (tensor.is_rotated) transform_pieces(tensor.head_dim / kPieceDims, values);
    POLYKV_UNROLL
    for (uint32_t i = 0; i < kMaxPieces; ++i) {
      const uint32_t dim = column + i * kPieceDims;
      if (dim >= tensor.head_dim) break;
      float value = values[i] * gain;
      if (tensor.signs.turns(dim)) value = -value;
      if (tensor.means != nullptr)
        value += tensor.means[uint64_t{block.kv_head} * tensor.head_dim + dim];
      block.a.range.put(block.kv_head, token, dim, value);
    }
  }

  /// A warp a row. What was decoded in their places is overwritten.
  POLYKV_HOST_DEVICE static void store_exact_rows(const Block& block) {
    const ExactRows& exact = block.a.exact;
    for (uint32_t i = block.thread / kWarpThreads; i < exact.count; i += kThreads / kWarpThreads) {
      const uint64_t token = exact.tokens[i];
      if (token / kBlockTokens != block.index || !block.a.range.holds(token)) continue;
      const uint32_t head_dim = block.a.tensor.head_dim;
      const uint16_t* row = exact.row(block.kv_head, i, head_dim);
      for (uint32_t dim = block.thread % kWarpThreads; dim < head_dim; dim += kWarpThreads)
        block.a.range.put(block.kv_head, token, dim, from_f16(row[dim]) * exact.unit);
    }
  }
};

/// K or V of `exact`: rows in the source dtype.
struct CopyRowsArguments {
  const uint8_t* blocks;  // [kv_head, block]
  uint64_t block_bytes;
  uint64_t block_count;  // of one kv_head
  uint64_t rows;         // offset in a block
  Dtype dtype;
  uint32_t head_dim;
  DecodeRange range;
};

struct CopyRowsKernel {
  using Arguments = CopyRowsArguments;
  static constexpr uint32_t kThreads = 256;
  static constexpr uint32_t kMinBlocks = 3;
  struct Shared {};

  template <typename Thread>
  POLYKV_HOST_DEVICE static void run(Thread& cuda, const Arguments& a) {
    const auto kv_head = static_cast<uint32_t>(cuda.block_index() / a.range.block_count);
    const uint64_t block = a.range.first_block + cuda.block_index() % a.range.block_count;
    const uint8_t* rows = a.blocks + (kv_head * a.block_count + block) * a.block_bytes + a.rows;
    const bool is_transposed = a.range.is_transposed();
    for (uint32_t task = cuda.thread_index(); task < kBlockTokens * a.head_dim; task += kThreads) {
      const uint32_t slot = is_transposed ? task % kBlockTokens : task / a.head_dim;
      const uint32_t dim = is_transposed ? task / kBlockTokens : task % a.head_dim;
      const uint64_t token = block * kBlockTokens + slot;
      if (!a.range.holds(token)) continue;
      a.range.put(kv_head, token, dim, load_element(rows, a.dtype, slot * a.head_dim + dim));
    }
  }
};

}  // namespace polykv::cuda
