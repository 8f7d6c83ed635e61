// The real model's head, each byte flipped in turn: a typed error or a valid load, under the sanitizers.
#include <catch2/catch.hpp>
#include <random>

#include "daemon/prefill/model/model.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/model.h"

using namespace polykv;

namespace {

struct Copy {
  std::string bytes = test::read_file(test::model_path_or_skip());
  UniqueFd fd = test::memfd_of(bytes);
};

/// Flips bits of bytes [begin, end) of the copy, one byte at a time, with each of `masks` (0: a mask drawn for each byte).
/// Configuration and tensor table are read each time, the tokenizer (tens of milliseconds) for each `tokenizer_step`-th
/// byte; gguf_test does all of it for every byte of a small model.
void flip_each_byte(Copy& copy, size_t begin, size_t end, const std::vector<uint8_t>& masks,
                    size_t tokenizer_step) {
  constexpr uint32_t kSeed = 20240601;
  std::mt19937 random(kSeed);
  size_t refused = 0;
  for (size_t offset = begin; offset < end; ++offset) {
    for (uint8_t mask : masks) {
      if (mask == 0) mask = random() % 2 == 0 ? 0xff : static_cast<uint8_t>(1U << random() % 8);
      const char flipped = static_cast<char>(copy.bytes[offset] ^ static_cast<char>(mask));
      REQUIRE(pwrite(copy.fd.get(), &flipped, 1, static_cast<off_t>(offset)) == 1);
      const auto model = Model::open(copy.fd.get(), "flipped");
      Status status = model.status();
      if (model.is_ok() && tokenizer_step != 0 && offset % tokenizer_step == 0) {
        status = Tokenizer::from_gguf(model->gguf()).status();
      }
      if (status.is_ok()) continue;
      ++refused;
      const bool typed =
          status.code() == POLYKV_ERR_MODEL_FORMAT || status.code() == POLYKV_ERR_MODEL_UNSUPPORTED;
      if (!typed || status.message().empty()) {
        FAIL("byte " << offset << ", mask " << int{mask} << ", seed " << kSeed << ": "
                     << status_name(status.code()) << " " << status.message());
      }
    }
    REQUIRE(pwrite(copy.fd.get(), &copy.bytes[offset], 1, static_cast<off_t>(offset)) == 1);
  }
  CHECK(refused > 0);
}

}  // namespace

TEST_CASE("each byte of the real model's first 4 KiB flipped gives a typed error or a valid load") {
  Copy copy;
  flip_each_byte(copy, 0, 4096, {0x01, 0xff}, 64);
}

TEST_CASE(
    "each byte of the real model's tensor table flipped gives a typed error or a valid load") {
  Copy copy;
  // The table begins with the first tensor's name, and its last entry is the last tensor's.
  const size_t begin = copy.bytes.find(test::gguf_string("token_embd.weight"));
  const std::string last = test::gguf_string("output_norm.weight");
  const size_t end = copy.bytes.find(last) + last.size() + 4 + 8 + 4 + 8;
  REQUIRE(begin < end);
  REQUIRE(end - begin > 10000);
  flip_each_byte(copy, begin, end, {0}, 0);
}
