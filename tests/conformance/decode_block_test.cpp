// Ops::decode_block of the instruction set in use: a block of codes to rows, in one step.
#include <catch2/catch.hpp>
#include <cstring>
#include <random>

#include "kernels/block_layout.h"
#include "kernels/cpu/ops.h"
#include "kernels/half.h"
#include "tests/support/compare_paths.h"
#include "tests/support/guarded_bytes.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr uint32_t kDims[] = {16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 240, 256, 368, 496};
constexpr uint64_t kMostStride = 496 + 64;

/// Codes of every kind: no encoder's, so that each code occurs everywhere.
struct RandomBlock {
  TensorRule rule;
  bool is_k;
  uint32_t dims;
  GuardedBytes codes;
  std::vector<float> gains;
  std::vector<float> means;

  RandomBlock(const TensorRule& tensor, bool of_k, uint32_t head_dim)
      : rule(tensor), is_k(of_k), dims(head_dim), codes(size_t{dims} * 8 * rule.bits) {
    std::mt19937_64 engine(dims * 16 + rule.bits);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (uint8_t& code : codes.span()) code = static_cast<uint8_t>(engine());
    for (uint32_t i = 0; i < kBlockTokens; ++i) gains.push_back(uniform(engine));
    gains[7] = 0;
    gains[20] = 1e30F;  // not in a half
    for (uint32_t i = 0; i < dims; ++i) means.push_back(20 * uniform(engine));
  }
  cpu::BlockCodes view(bool has_means) const {
    return {rule,
            is_k,
            codes.span().data(),
            dims,
            gains.data(),
            has_means ? means.data() : nullptr,
            codes.span().data()};
  }
};

template <typename Action>
void for_each_block_kind(Action action) {
  for (const ProfileRule& rule : kProfileRules) {
    for (const uint32_t dims : kDims) {
      for (const bool is_k : {false, true}) action(RandomBlock(is_k ? rule.k : rule.v, is_k, dims));
    }
  }
}

/// What a target's bytes are after decoding some of the block's rows into it.
AlignedBytes decoded(const cpu::Ops& ops, const cpu::BlockCodes& block, cpu::RowsTarget target) {
  AlignedBytes bytes(kBlockTokens * kMostStride * sizeof(float));
  target.data = bytes.span().data();
  ops.decode_block(block, target);
  return bytes;
}

/// The steps that decode_block does at once, by the instruction set that has only these.
std::vector<float> by_steps(const cpu::BlockCodes& block) {
  const cpu::Ops& ops = cpu::baseline_ops();
  std::vector<float> rows(size_t{kBlockTokens} * block.dims);
  std::vector<uint8_t> codes(rows.size());
  if (block.rule.rotated) {
    (block.is_k ? ops.k_unpack : ops.v_unpack)(block.codes, block.dims, block.rule.bits,
                                               codes.data());
    ops.rotated_decode(codes.data(), block.dims, block.rule, block.gains, block.means, rows.data(),
                       block.dims);
  } else if (block.is_k) {
    ops.k8_unpack(block.codes, block.dims, block.gains, block.means, rows.data(), block.dims);
  } else {
    ops.v8_unpack(block.codes, block.dims, block.gains, rows.data(), block.dims);
  }
  return rows;
}

}  // namespace

TEST_CASE("a block decoded at once is the block decoded in steps") {
  const cpu::Ops& ops = cpu::ops();
  if (ops.decode_block == nullptr) return;
  for_each_block_kind([&](const RandomBlock& random) {
    const cpu::BlockCodes block = random.view(random.is_k);
    INFO(ops.name << ": " << random.rule.bits << " bits of " << (random.is_k ? "K" : "V") << ", "
                  << random.dims << " dims");
    const AlignedBytes bytes =
        decoded(ops, block, {nullptr, random.dims, Dtype::f32, false, 0, kBlockTokens});
    const std::vector<float> want = by_steps(block);
    const auto* got = reinterpret_cast<const float*>(bytes.span().data());
    for (uint32_t token = 0; token < kBlockTokens; ++token) {
      const size_t at = size_t{token} * random.dims;
      const std::vector<float> row(got + at, got + at + random.dims);
      const std::vector<float> wanted(want.begin() + static_cast<int64_t>(at),
                                      want.begin() + static_cast<int64_t>(at + random.dims));
      if (random.gains[token] == 0 && !random.is_k) {
        CHECK(row == wanted);
      } else {
        CHECK(relative_error(row, wanted) <= 1e-6);
      }
    }
  });
}

TEST_CASE("a decoded half is the decoded fp32 value, rounded") {
  const cpu::Ops& ops = cpu::ops();
  if (ops.decode_block == nullptr) return;
  for_each_block_kind([&](const RandomBlock& random) {
    const cpu::BlockCodes block = random.view(random.is_k);
    const auto target = [&](Dtype dtype) {
      return cpu::RowsTarget{nullptr, random.dims, dtype, false, 0, kBlockTokens};
    };
    const AlignedBytes whole = decoded(ops, block, target(Dtype::f32));
    const AlignedBytes f16 = decoded(ops, block, target(Dtype::f16));
    const AlignedBytes bf16 = decoded(ops, block, target(Dtype::bf16));
    const auto* values = reinterpret_cast<const float*>(whole.span().data());
    const auto* f16_halves = reinterpret_cast<const uint16_t*>(f16.span().data());
    const auto* bf16_halves = reinterpret_cast<const uint16_t*>(bf16.span().data());
    uint64_t different = 0;
    for (size_t i = 0; i < size_t{kBlockTokens} * random.dims; ++i) {
      if (f16_halves[i] != f16_from_f32(values[i])) ++different;
      if (bf16_halves[i] != bf16_from_f32(values[i])) ++different;
    }
    INFO(ops.name << ": " << random.rule.bits << " bits, " << random.dims << " dims");
    CHECK(different == 0);
  });
}

TEST_CASE("every instruction set decodes to the same bits, and writes only the rows asked for") {
  const cpu::Ops& ops = cpu::ops();
  const cpu::Ops* avx2 = cpu::avx2_ops();
  if (avx2 == nullptr || ops.decode_block == nullptr) return;
  std::mt19937 engine(1);
  for_each_block_kind([&](const RandomBlock& random) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      for (const uint32_t gap : {0U, 64U}) {
        for (const bool streams : {false, true}) {
          const uint32_t low = streams == (gap == 0) ? 0 : engine() % kBlockTokens;
          const uint32_t high =
              low == 0 && gap == 0 ? kBlockTokens : low + 1 + engine() % (kBlockTokens - low);
          const bool fits_lines = random.dims * dtype_size_bytes(dtype) % 64 == 0;
          const cpu::RowsTarget target{
              nullptr, random.dims + gap, dtype, streams && fits_lines, low, high};
          const cpu::BlockCodes block = random.view(random.is_k);
          const AlignedBytes got = decoded(ops, block, target);
          const AlignedBytes want = decoded(*avx2, block, target);
          INFO(ops.name << ": " << random.rule.bits << " bits of " << (random.is_k ? "K" : "V")
                        << ", " << random.dims << " dims to " << dtype_name(dtype) << ", tokens "
                        << low << " to " << high);
          CHECK(std::memcmp(got.span().data(), want.span().data(), got.span().size()) == 0);
          // What is between rows and behind the last one.
          const size_t size = dtype_size_bytes(dtype);
          const uint8_t* end =
              got.span().data() + ((high - low - 1) * (random.dims + gap) + random.dims) * size;
          CHECK(end[0] == 0xa5);
          CHECK(end[63] == 0xa5);
        }
      }
    }
  });
}

TEST_CASE("gains that are no number decode to no number, in every dtype") {
  const cpu::Ops& ops = cpu::ops();
  if (ops.decode_block == nullptr) return;
  RandomBlock random(rotated_k(5), true, 80);
  random.gains[3] = std::numeric_limits<float>::quiet_NaN();
  random.gains[40] = std::bit_cast<float>(0x7fffffffU);
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const AlignedBytes bytes =
        decoded(ops, random.view(true), {nullptr, 80, dtype, false, 0, kBlockTokens});
    for (uint32_t i = 0; i < kBlockTokens * 80; ++i) {
      float value;
      uint16_t half;
      std::memcpy(&value, bytes.span().data() + i * 4 % bytes.span().size(), 4);
      std::memcpy(&half, bytes.span().data() + i * 2, 2);
      if (dtype == Dtype::f16) value = f32_from_f16(half);
      if (dtype == Dtype::bf16) value = f32_from_bf16(half);
      CHECK(std::isnan(value) == (i / 80 == 3 || i / 80 == 40));
    }
  }
}
