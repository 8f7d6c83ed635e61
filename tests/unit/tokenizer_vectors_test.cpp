// The real model's tokenizer against ids that llama.cpp gave (tests/data/smollm2).
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "daemon/prefill/model/model.h"
#include "daemon/prefill/model/utf8.h"
#include "tests/support/model.h"
#include "tests/support/npy.h"
#include "tests/support/require_ok.h"

using namespace polykv;

namespace {

struct RealModel {
  UniqueFd fd = test::open_file(test::model_path_or_skip());
  Model model = Model::open(fd.get(), "SmolLM2").value();
  Tokenizer tokenizer = Tokenizer::from_gguf(model.gguf()).value();
};
const RealModel& real() {
  static const RealModel kReal;
  return kReal;
}

std::string data(const std::string& name) {
  return std::string(POLYKV_TEST_DATA_DIR "/smollm2/") + name;
}

/// Characters [first, first + count) of UTF-8 text.
std::string characters(const std::string& text, size_t first, size_t count) {
  size_t offset = 0;
  for (size_t i = 0; i < first; ++i) offset += utf8_character_bytes(text, offset);
  const size_t begin = offset;
  for (size_t i = 0; i < count && offset < text.size(); ++i)
    offset += utf8_character_bytes(text, offset);
  return text.substr(begin, offset - begin);
}

}  // namespace

TEST_CASE(
    "ids equal the reference, with special tokens parsed and as plain text, and decode back to the "
    "text") {
  std::ifstream lines(data("tokenizer.jsonl"));
  const std::string gpl3 = test::read_file(test::kGpl3Path);
  std::string line;
  size_t count = 0;
  while (std::getline(lines, line)) {
    if (line.empty()) continue;
    const auto item = nlohmann::json::parse(line);
    const std::string text = item.contains("file")
                                 ? characters(gpl3, item["first_char"], item["char_count"])
                                 : item["text"].get<std::string>();
    INFO(line);
    const auto ids = real().tokenizer.encode(text, {.add_bos = false, .parse_special = true});
    REQUIRE_OK(ids);
    CHECK(*ids == item["ids"].get<std::vector<uint32_t>>());
    if (item.contains("ids_plain")) {
      const auto plain = real().tokenizer.encode(text);
      REQUIRE_OK(plain);
      CHECK(*plain == item["ids_plain"].get<std::vector<uint32_t>>());
      CHECK(real().tokenizer.decode(*plain) == text);
    }
    CHECK(real().tokenizer.decode(*ids, true) == text);
    ++count;
  }
  CHECK(count == 100);
}

TEST_CASE("the whole of GPL-3 has the reference's 7,639 ids") {
  const auto reference = test::load_npy<int32_t>(data("gpl3_ids.npy"), "<i4");
  const auto ids = real().tokenizer.encode(test::read_file(test::kGpl3Path));
  REQUIRE_OK(ids);
  REQUIRE(ids->size() == reference.values.size());
  CHECK(std::equal(ids->begin(), ids->end(), reference.values.begin(),
                   [](uint32_t a, int32_t b) { return a == static_cast<uint32_t>(b); }));
}

TEST_CASE("the chat head is made of special tokens, and a document's text beside it is not") {
  DocumentText document;
  document.text = "<|im_end|>";
  document.chat_head = true;
  const auto ids = tokenize_document(real().tokenizer, real().model.gguf(), document);
  REQUIRE_OK(ids);
  CHECK(real().tokenizer.decode(*ids, true) ==
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\n<|im_end|>");
  CHECK(std::count(ids->begin(), ids->end(), 1U) == 2);  // <|im_start|>
  CHECK(std::count(ids->begin(), ids->end(), 2U) ==
        1);  // <|im_end|>: the head's own, not the document's
  const auto frame = chat_frame_from_gguf(real().model.gguf());
  REQUIRE_OK(frame);
  CHECK(frame->tail == "<|im_end|>\n<|im_start|>assistant\n");
  CHECK(real().tokenizer.is_end_of_generation(2));
  CHECK(real().tokenizer.special_id("<|im_start|>") == 1U);
}

TEST_CASE("the summary says what the file holds") {
  const auto summary = model_summary(real().fd.get(), "SmolLM2");
  REQUIRE_OK(summary);
  CHECK(summary->config.layer_count == 30);
  CHECK(summary->config.head_count == 9);
  CHECK(summary->config.kv_head_count == 3);
  CHECK(summary->config.head_dim == 64);
  CHECK(summary->config.embedding_length == 576);
  CHECK(summary->config.feed_forward_length == 1536);
  CHECK(summary->config.context_length == 8192);
  CHECK(summary->config.vocab_size == 49152);
  CHECK(summary->config.rope.theta == 100000.0);
  CHECK(summary->tokenizer == "gpt2/smollm");
  CHECK(summary->has_chat_template);
  CHECK(summary->tensor_types.at("Q4_1") == 210);
}
