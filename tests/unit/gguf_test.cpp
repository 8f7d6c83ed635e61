// The GGUF reader on files that are right, truncated, or lie about a field.
#include <catch2/catch.hpp>
#include <functional>

#include "daemon/prefill/model/model.h"
#include "daemon/prefill/model/weights.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using test::GgufBuilder;
using test::little_endian;

namespace {

/// Everything that reads a model file: head, configuration, tokenizer, chat template, weights.
Status load_all(const std::string& bytes) {
  const UniqueFd fd = test::memfd_of(bytes);
  const auto model = Model::open(fd.get(), "test");
  if (!model.is_ok()) return model.status();
  const auto tokenizer = Tokenizer::from_gguf(model->gguf());
  if (!tokenizer.is_ok()) return tokenizer.status();
  const auto ids =
      tokenizer->encode("hello world <|im_end|>", {.add_bos = false, .parse_special = true});
  if (!ids.is_ok()) return ids.status();
  const auto weights = Weights::load(*model, 1);
  return weights.is_ok() ? Status::ok() : weights.status();
}

bool is_typed(const Status& status) {
  return status.code() == POLYKV_ERR_MODEL_FORMAT || status.code() == POLYKV_ERR_MODEL_UNSUPPORTED;
}

/// Byte `offset` of the file, where `needle` begins, plus `after` bytes.
size_t position_of(const std::string& bytes, const std::string& needle, size_t after = 0) {
  const size_t found = bytes.find(needle);
  REQUIRE(found != std::string::npos);
  return found + needle.size() + after;
}

template <typename T>
std::string patched(std::string bytes, size_t offset, T value) {
  const std::string replacement = little_endian(value);
  return bytes.replace(offset, replacement.size(), replacement);
}

}  // namespace

TEST_CASE("a small model of all tensor types loads, and its configuration is what the file says") {
  const UniqueFd fd = test::memfd_of(test::tiny_llama().build());
  const auto model = Model::open(fd.get(), "tiny");
  REQUIRE_OK(model);
  const ModelConfig& config = model->config();
  CHECK(config.name == "tiny");
  CHECK(config.layer_count == 2);
  CHECK(config.head_dim == 16);
  CHECK(config.group_size() == 2);
  CHECK(config.vocab_size == 263);
  CHECK(model->tensors().output != nullptr);
  CHECK_OK(load_all(test::tiny_llama().build()));
  const ModelIdentity identity = model_identity(config, Digest{});
  CHECK(identity.layers == std::vector<LayerGeometry>(2, {2, 16, 16, 0}));
  CHECK(identity.rope.kind == RopeKind::half_rotation);
}

TEST_CASE("a model whose name is none loads, without a name") {
  GgufBuilder builder = test::tiny_llama();
  builder.set_string("general.name", GENERATE(as<std::string>(), "two\nlines", "\xff", "",
                                              std::string(60'000, 'x')));
  const UniqueFd fd = test::memfd_of(builder.build());
  const auto model = Model::open(fd.get(), "tiny");
  REQUIRE_OK(model);
  CHECK(model_identity(model->config(), Digest{}).name.empty());
}

TEST_CASE("a file cut anywhere is malformed, and says so") {
  GgufBuilder builder = test::tiny_llama();
  const std::string bytes = builder.build();
  for (size_t size = 0; size < bytes.size(); size += size < builder.head_bytes ? 1 : 997) {
    const Status status = load_all(bytes.substr(0, size));
    if (status.code() != POLYKV_ERR_MODEL_FORMAT)
      FAIL("cut at " << size << ": " << status.message());
  }
  CHECK(load_all(bytes.substr(0, bytes.size() - 1)).code() == POLYKV_ERR_MODEL_FORMAT);
}

TEST_CASE("a file that shrinks while it is read gives an error") {
  const std::string bytes = test::tiny_llama().build();
  const UniqueFd fd = test::memfd_of(bytes);
  const auto model = Model::open(fd.get(), "test");
  REQUIRE_OK(model);
  REQUIRE(ftruncate(fd.get(), static_cast<off_t>(bytes.size() / 2)) == 0);
  CHECK(Weights::load(*model, 2).status().code() == POLYKV_ERR_MODEL_FORMAT);
  CHECK(model_fingerprint(*model).status().code() == POLYKV_ERR_MODEL_FORMAT);
}

TEST_CASE("each field that lies is found, with a code and a message that names it") {
  struct Lie {
    const char* what;
    std::function<void(GgufBuilder&)> tell;
    polykv_status code;
    const char* message;
  };
  const std::vector<Lie> lies = {
      {"magic", [](GgufBuilder& b) { b.magic = "GGML"; }, POLYKV_ERR_MODEL_FORMAT, "GGUF"},
      {"version", [](GgufBuilder& b) { b.version = 2; }, POLYKV_ERR_MODEL_UNSUPPORTED, "version 2"},
      {"big-endian", [](GgufBuilder& b) { b.version = 0x03000000; }, POLYKV_ERR_MODEL_UNSUPPORTED,
       "big-endian"},
      {"tensor count", [](GgufBuilder& b) { b.tensor_count_extra = 1; }, POLYKV_ERR_MODEL_FORMAT,
       ""},
      {"huge tensor count", [](GgufBuilder& b) { b.tensor_count_extra = ~uint64_t{0} / 2; },
       POLYKV_ERR_MODEL_FORMAT, "tensor count"},
      {"metadata count", [](GgufBuilder& b) { b.metadata_count_extra = 1; },
       POLYKV_ERR_MODEL_FORMAT, ""},
      {"huge metadata count", [](GgufBuilder& b) { b.metadata_count_extra = ~uint64_t{0} / 2; },
       POLYKV_ERR_MODEL_FORMAT, "metadata count"},
      {"no dimensions", [](GgufBuilder& b) { b.tensors[3].dimensions.clear(); },
       POLYKV_ERR_MODEL_FORMAT, "dimensions"},
      {"too many dimensions",
       [](GgufBuilder& b) {
         b.tensors[3].dimensions = {32, 2, 1, 1, 1};
       },
       POLYKV_ERR_MODEL_FORMAT, "dimensions"},
      {"zero dimension", [](GgufBuilder& b) { b.tensors[3].dimensions[1] = 0; },
       POLYKV_ERR_MODEL_FORMAT, "dimension 1"},
      {"dimensions that overflow",
       [](GgufBuilder& b) {
         b.tensors[3].dimensions = {uint64_t{1} << 33, uint64_t{1} << 33};
       },
       POLYKV_ERR_MODEL_FORMAT, "dimension"},
      {"huge dimension", [](GgufBuilder& b) { b.tensors[3].dimensions[1] = ~uint64_t{0}; },
       POLYKV_ERR_MODEL_FORMAT, "dimension"},
      {"row of half a block",
       [](GgufBuilder& b) {
         b.tensor("blk.0.attn_q.weight").dimensions = {48, 64};
       },
       POLYKV_ERR_MODEL_FORMAT, "multiple"},
      {"wrong shape",
       [](GgufBuilder& b) {
         b.tensor("blk.0.attn_q.weight").dimensions = {64, 32};
       },
       POLYKV_ERR_MODEL_FORMAT, "attn_q"},
      {"transposed shape",
       [](GgufBuilder& b) {
         b.tensor("blk.1.ffn_down.weight").dimensions = {64, 96};
       },
       POLYKV_ERR_MODEL_FORMAT, "ffn_down"},
      {"unknown tensor type", [](GgufBuilder& b) { b.tensors[2].type = 12; },
       POLYKV_ERR_MODEL_UNSUPPORTED, "type number 12"},
      {"larger tensor type", [](GgufBuilder& b) { b.tensor("output.weight").type = 0; },
       POLYKV_ERR_MODEL_FORMAT, "output.weight"},
      {"offset beyond the end",
       [](GgufBuilder& b) {
         b.tensors[2].keep_offset = true;
         b.tensors[2].offset = 1 << 20;
       },
       POLYKV_ERR_MODEL_FORMAT, "beyond"},
      {"offset that overflows",
       [](GgufBuilder& b) {
         b.tensors[2].keep_offset = true;
         b.tensors[2].offset = ~uint64_t{31};
       },
       POLYKV_ERR_MODEL_FORMAT, "beyond"},
      {"offset not aligned",
       [](GgufBuilder& b) {
         b.tensors[2].keep_offset = true;
         b.tensors[2].offset = 33;
       },
       POLYKV_ERR_MODEL_FORMAT, "alignment"},
      {"overlapping tensors",
       [](GgufBuilder& b) {
         b.tensors[2].keep_offset = true;
         b.tensors[2].offset = 0;
       },
       POLYKV_ERR_MODEL_FORMAT, "overlap"},
      {"tensor twice", [](GgufBuilder& b) { b.tensors[2].name = b.tensors[3].name; },
       POLYKV_ERR_MODEL_FORMAT, "twice"},
      {"tensor without a name", [](GgufBuilder& b) { b.tensors[2].name.clear(); },
       POLYKV_ERR_MODEL_FORMAT, "empty"},
      {"tensor missing",
       [](GgufBuilder& b) {
         b.tensors.pop_back();
         b.tensors.pop_back();
       },
       POLYKV_ERR_MODEL_FORMAT, "output_norm.weight' is missing"},
      {"tensor unknown",
       [](GgufBuilder& b) {
         b.tensors.push_back({"blk.0.attn_q.bias", 0, {64}, std::string(256, '\0'), 0, false});
       },
       POLYKV_ERR_MODEL_UNSUPPORTED, "attn_q.bias"},
      {"alignment zero", [](GgufBuilder& b) { b.set_u32("general.alignment", 0); },
       POLYKV_ERR_MODEL_FORMAT, "general.alignment"},
      {"alignment no power of two", [](GgufBuilder& b) { b.set_u32("general.alignment", 48); },
       POLYKV_ERR_MODEL_FORMAT, "power of two"},
      {"alignment huge", [](GgufBuilder& b) { b.set_u32("general.alignment", 0x80000000U); },
       POLYKV_ERR_MODEL_FORMAT, "general.alignment"},
      {"alignment of a wrong type", [](GgufBuilder& b) { b.set_string("general.alignment", "32"); },
       POLYKV_ERR_MODEL_FORMAT, "general.alignment"},
      {"boolean 2", [](GgufBuilder& b) { b.set_bool("a", 2); }, POLYKV_ERR_MODEL_FORMAT, "boolean"},
      {"unknown value type", [](GgufBuilder& b) { b.metadata["a"] = little_endian<uint32_t>(13); },
       POLYKV_ERR_MODEL_FORMAT, "value type 13"},
      {"array of unknown type",
       [](GgufBuilder& b) {
         b.metadata["a"] =
             little_endian<uint32_t>(9) + little_endian<uint32_t>(99) + little_endian<uint64_t>(0);
       },
       POLYKV_ERR_MODEL_FORMAT, "value type 99"},
      {"array of arrays",
       [](GgufBuilder& b) {
         b.metadata["a"] =
             little_endian<uint32_t>(9) + little_endian<uint32_t>(9) + little_endian<uint64_t>(0);
       },
       POLYKV_ERR_MODEL_UNSUPPORTED, "array of arrays"},
      {"array count",
       [](GgufBuilder& b) {
         b.metadata["a"] = little_endian<uint32_t>(9) + little_endian<uint32_t>(4) +
                           little_endian<uint64_t>(1 << 20);
       },
       POLYKV_ERR_MODEL_FORMAT, "beyond the file's end"},
      {"array count that overflows",
       [](GgufBuilder& b) {
         b.metadata["a"] = little_endian<uint32_t>(9) + little_endian<uint32_t>(10) +
                           little_endian<uint64_t>(uint64_t{1} << 61);
       },
       POLYKV_ERR_MODEL_FORMAT, "count"},
      {"string length",
       [](GgufBuilder& b) {
         b.metadata["a"] = little_endian<uint32_t>(8) + little_endian<uint64_t>(~uint64_t{0});
       },
       POLYKV_ERR_MODEL_FORMAT, "length"},
      {"string length beyond the end",
       [](GgufBuilder& b) {
         b.metadata["a"] = little_endian<uint32_t>(8) + little_endian<uint64_t>(1 << 21);
       },
       POLYKV_ERR_MODEL_FORMAT, "beyond the file's end"},
      {"empty key", [](GgufBuilder& b) { b.set_u32("", 1); }, POLYKV_ERR_MODEL_FORMAT, "empty"},
      {"architecture", [](GgufBuilder& b) { b.set_string("general.architecture", "mamba"); },
       POLYKV_ERR_MODEL_UNSUPPORTED, "'mamba'"},
      {"no architecture", [](GgufBuilder& b) { b.metadata.erase("general.architecture"); },
       POLYKV_ERR_MODEL_FORMAT, "general.architecture"},
      {"architecture of a wrong type", [](GgufBuilder& b) { b.set_u32("general.architecture", 7); },
       POLYKV_ERR_MODEL_FORMAT, "general.architecture"},
      {"layer count", [](GgufBuilder& b) { b.set_u32("llama.block_count", 3); },
       POLYKV_ERR_MODEL_FORMAT, "blk.2.attn_norm.weight"},
      {"too few layers", [](GgufBuilder& b) { b.set_u32("llama.block_count", 1); },
       POLYKV_ERR_MODEL_UNSUPPORTED, "blk.1."},
      {"no layers", [](GgufBuilder& b) { b.set_u32("llama.block_count", 0); },
       POLYKV_ERR_MODEL_FORMAT, "llama.block_count"},
      {"heads", [](GgufBuilder& b) { b.set_u32("llama.attention.head_count", 3); },
       POLYKV_ERR_MODEL_FORMAT, "heads"},
      {"kv_heads", [](GgufBuilder& b) { b.set_u32("llama.attention.head_count_kv", 0); },
       POLYKV_ERR_MODEL_FORMAT, "head_count_kv"},
      {"epsilon",
       [](GgufBuilder& b) { b.set_f32("llama.attention.layer_norm_rms_epsilon", -1.0F); },
       POLYKV_ERR_MODEL_FORMAT, "epsilon"},
      {"RoPE base not a number",
       [](GgufBuilder& b) { b.set_f32("llama.rope.freq_base", __builtin_nanf("")); },
       POLYKV_ERR_MODEL_FORMAT, "freq_base"},
      {"RoPE dimensions", [](GgufBuilder& b) { b.set_u32("llama.rope.dimension_count", 8); },
       POLYKV_ERR_MODEL_UNSUPPORTED, "dimension_count"},
      {"RoPE scaling", [](GgufBuilder& b) { b.set_string("llama.rope.scaling.type", "yarn"); },
       POLYKV_ERR_MODEL_UNSUPPORTED, "'yarn'"},
      {"experts", [](GgufBuilder& b) { b.set_u32("llama.expert_count", 8); },
       POLYKV_ERR_MODEL_UNSUPPORTED, "expert_count"},
      {"a sliding window",
       [](GgufBuilder& b) { b.set_u32("llama.attention.sliding_window", 4096); },
       POLYKV_ERR_MODEL_UNSUPPORTED, "sliding_window"},
      {"vocabulary size", [](GgufBuilder& b) { b.set_u32("llama.vocab_size", 264); },
       POLYKV_ERR_MODEL_FORMAT, "vocab_size"},
      {"tokenizer model", [](GgufBuilder& b) { b.set_string("tokenizer.ggml.model", "llama"); },
       POLYKV_ERR_MODEL_UNSUPPORTED, "'llama'"},
      {"pre-tokenizer", [](GgufBuilder& b) { b.set_string("tokenizer.ggml.pre", "other"); },
       POLYKV_ERR_MODEL_UNSUPPORTED, "'other'"},
      {"token types",
       [](GgufBuilder& b) {
         b.set_i32s("tokenizer.ggml.token_type", {1, 1});
       },
       POLYKV_ERR_MODEL_FORMAT, "token types"},
      {"merge of nothing", [](GgufBuilder& b) { b.set_strings("tokenizer.ggml.merges", {"x y"}); },
       POLYKV_ERR_MODEL_FORMAT, "merge 0"},
      {"merge without parts",
       [](GgufBuilder& b) { b.set_strings("tokenizer.ggml.merges", {"hello"}); },
       POLYKV_ERR_MODEL_FORMAT, "merge 0"},
      {"BOS outside the vocabulary",
       [](GgufBuilder& b) { b.set_u32("tokenizer.ggml.bos_token_id", 263); },
       POLYKV_ERR_MODEL_FORMAT, "bos_token_id"},
  };
  for (const Lie& lie : lies) {
    GgufBuilder builder = test::tiny_llama();
    lie.tell(builder);
    const Status status = load_all(builder.build());
    INFO(lie.what << ": " << status.message());
    CHECK(status.code() == lie.code);
    CHECK(status.message().find(lie.message) != std::string::npos);
    CHECK(status.message().find(';') != std::string::npos);  // a remedy follows
  }
}

TEST_CASE("a metadata key that is there twice is malformed") {
  GgufBuilder builder = test::tiny_llama();
  builder.set_u32("llama.block_counu", 2);
  std::string bytes = builder.build();
  bytes[position_of(bytes, "llama.block_counu") - 1] = 't';
  const Status status = load_all(bytes);
  CHECK(status.code() == POLYKV_ERR_MODEL_FORMAT);
  CHECK(status.message().find("twice") != std::string::npos);
}

TEST_CASE("a string's length that runs into the next field is found") {
  GgufBuilder builder = test::tiny_llama();
  const std::string bytes = builder.build();
  const size_t length_at = position_of(bytes, test::gguf_string("general.name"), 4);
  for (const uint64_t length :
       {uint64_t{3}, uint64_t{5}, uint64_t{1} << 32, ~uint64_t{0}, uint64_t{1} << 63}) {
    const Status status = load_all(patched(bytes, length_at, length));
    INFO(length << ": " << status.message());
    CHECK(is_typed(status));
  }
}

TEST_CASE("each byte of the head flipped gives a typed error or a valid load") {
  GgufBuilder builder = test::tiny_llama();
  const std::string bytes = builder.build();
  size_t refused = 0;
  for (size_t offset = 0; offset < builder.head_bytes; ++offset) {
    for (const char mask : {'\x01', '\xff'}) {
      std::string flipped = bytes;
      flipped[offset] = static_cast<char>(flipped[offset] ^ mask);
      const Status status = load_all(flipped);
      if (status.is_ok()) continue;
      ++refused;
      if (!is_typed(status) || status.message().empty()) {
        FAIL("byte " << offset << ", mask " << int{mask} << ": " << status_name(status.code())
                     << " " << status.message());
      }
    }
  }
  CHECK(refused > builder.head_bytes / 2);
}

TEST_CASE("what is no regular file is refused") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  CHECK(Model::open(reader.get(), "pipe").status().code() == POLYKV_ERR_MODEL_FORMAT);
  CHECK(Model::open(-1, "nothing").status().code() == POLYKV_ERR_SYSTEM);
}
