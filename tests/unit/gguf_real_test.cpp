// The real model's head, each byte flipped in turn: a typed error or a valid load, under the sanitizers. (gguf_test does
// the same, twice for every byte and with tokenizer and weights, for a small model.)
#include <catch2/catch.hpp>
#include <functional>
#include <random>

#include "daemon/prefill/model/model.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/model.h"
#include "tests/support/require_ok.h"

using namespace polykv;

namespace {

constexpr uint32_t kSeed = 20240601;

const std::string& real_bytes() {
  static const std::string kBytes = test::read_file(test::model_path_or_skip());
  return kBytes;
}

/// Flips bytes [begin, end) of the memfd's first bytes, one at a time: all bits, or one drawn bit.
void flip_each_byte(const UniqueFd& fd, const std::string& bytes, size_t begin, size_t end,
                    const std::function<Status(size_t offset)>& load) {
  std::mt19937 random(kSeed);
  size_t refused = 0;
  for (size_t offset = begin; offset < end; ++offset) {
    const auto mask = static_cast<uint8_t>(random() % 2 == 0 ? 0xffU : 1U << random() % 8);
    const char flipped = static_cast<char>(bytes[offset] ^ static_cast<char>(mask));
    REQUIRE(pwrite(fd.get(), &flipped, 1, static_cast<off_t>(offset)) == 1);
    const Status status = load(offset);
    REQUIRE(pwrite(fd.get(), &bytes[offset], 1, static_cast<off_t>(offset)) == 1);
    if (status.is_ok()) continue;
    ++refused;
    const bool typed =
        status.code() == POLYKV_ERR_MODEL_FORMAT || status.code() == POLYKV_ERR_MODEL_UNSUPPORTED;
    if (!typed || status.message().empty()) {
      FAIL("byte " << offset << ", mask " << int{mask} << ", seed " << kSeed << ": "
                   << status_name(status.code()) << " " << status.message());
    }
  }
  CHECK(refused > (end - begin) / 4);
  CHECK_OK(load(0));  // everything is as it was
}

}  // namespace

TEST_CASE("each byte of the real model's first 4 KiB flipped gives a typed error or a valid load") {
  const UniqueFd fd = test::memfd_of(real_bytes());
  // The tokenizer takes a tenth of a second under the sanitizers: for some of the bytes only.
  constexpr size_t kTokenizerStep = 256;
  flip_each_byte(fd, real_bytes(), 0, 4096, [&](size_t offset) {
    const auto model = Model::open(fd.get(), "flipped");
    if (!model.is_ok() || offset % kTokenizerStep != 0) return model.status();
    return Tokenizer::from_gguf(model->gguf()).status();
  });
}

TEST_CASE(
    "each byte of the real model's tensor table flipped gives a typed error or a valid load") {
  // Without the vocabulary's three arrays, which would be read 16,000 times, and with a hole for the tensors' data. The
  // table is checked against the configuration of the whole file.
  const std::string& whole = real_bytes();
  const UniqueFd whole_fd = test::memfd_of(whole);
  const ModelConfig config = Model::open(whole_fd.get(), "whole").value().config();
  const size_t vocabulary = whole.find(test::gguf_string("tokenizer.ggml.tokens"));
  const size_t rest = whole.find(test::gguf_string("tokenizer.ggml.bos_token_id"));
  const size_t table = whole.find(test::gguf_string("token_embd.weight"));
  const std::string last = test::gguf_string("output_norm.weight");
  const size_t table_end = whole.find(last) + last.size() + 4 + 8 + 4 + 8;
  REQUIRE(vocabulary < rest);
  REQUIRE(table < table_end);
  std::string head = whole.substr(0, vocabulary) + whole.substr(rest, table_end - rest);
  uint64_t metadata_count = 0;
  std::memcpy(&metadata_count, &head[16], sizeof metadata_count);
  head.replace(16, 8, test::little_endian(metadata_count - 3));

  const UniqueFd fd = test::memfd_of(head);
  const size_t data_bytes = whole.size() - table_end;
  REQUIRE(ftruncate(fd.get(), static_cast<off_t>(head.size() + data_bytes + 32)) == 0);
  const size_t begin = vocabulary + (table - rest);
  REQUIRE(head.size() - begin > 10000);
  flip_each_byte(fd, head, begin, head.size(), [&](size_t) -> Status {
    POLYKV_ASSIGN_OR_RETURN(const FileSource file, FileSource::open(fd.get(), "flipped"));
    POLYKV_ASSIGN_OR_RETURN(const GgufFile gguf, GgufFile::parse(file));
    return find_llama_tensors(gguf, config).status();
  });
}
