// Typed access to what the parser found.
#include "daemon/prefill/model/gguf.h"

#include <cassert>
#include <cinttypes>

#include "daemon/prefill/model/gguf_bytes.h"

namespace polykv {

using gguf_internal::kFetchAgain;
using gguf_internal::load;

const TensorInfo* GgufFile::tensor(std::string_view name) const {
  const auto found = tensor_index_.find(std::string(name));
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

Result<GgufFile::Value> GgufFile::find(std::string_view key) const {
  const auto found = values_.find(key);
  if (found != values_.end()) return found->second;
  return {POLYKV_ERR_MODEL_FORMAT, "read model " + quoted(name_) + ": metadata " + quoted(key) +
                                       " is missing; convert the model with a current tool"};
}

Status GgufFile::wrong_type(std::string_view key, const Value& value, const char* expected) const {
  return {POLYKV_ERR_MODEL_FORMAT,
          format("read model %s: metadata %s has value type %u where %s is expected; %s",
                 quoted(name_).c_str(), quoted(key).c_str(), value.type, expected, kFetchAgain)};
}

Result<uint64_t> GgufFile::integer(std::string_view key, uint64_t least, uint64_t most) const {
  POLYKV_ASSIGN_OR_RETURN(const Value value, find(key));
  const uint8_t* bytes = head_.data() + value.begin;
  int64_t number = 0;
  switch (static_cast<ValueType>(value.type)) {
    case ValueType::u8:
      number = load<uint8_t>(bytes);
      break;
    case ValueType::i8:
      // NOLINTNEXTLINE(bugprone-signed-char-misuse, cert-str34-c): a number, no character
      number = load<int8_t>(bytes);
      break;
    case ValueType::u16:
      number = load<uint16_t>(bytes);
      break;
    case ValueType::i16:
      number = load<int16_t>(bytes);
      break;
    case ValueType::u32:
      number = load<uint32_t>(bytes);
      break;
    case ValueType::i32:
      number = load<int32_t>(bytes);
      break;
    case ValueType::u64:  // above 2^63 it turns negative and is refused below like any other
    case ValueType::i64:
      number = load<int64_t>(bytes);
      break;
    default:
      return wrong_type(key, value, "an integer");
  }
  assert(most <= static_cast<uint64_t>(INT64_MAX));
  if (number >= 0 && static_cast<uint64_t>(number) >= least &&
      static_cast<uint64_t>(number) <= most) {
    return static_cast<uint64_t>(number);
  }
  return {POLYKV_ERR_MODEL_FORMAT,
          format("read model %s: metadata %s is %" PRId64 ", allowed are %" PRIu64 " to %" PRIu64
                 "; %s",
                 quoted(name_).c_str(), quoted(key).c_str(), number, least, most, kFetchAgain)};
}

Result<double> GgufFile::number(std::string_view key, double least, double most) const {
  POLYKV_ASSIGN_OR_RETURN(const Value value, find(key));
  const uint8_t* bytes = head_.data() + value.begin;
  double number = 0;
  if (value.type == static_cast<uint32_t>(ValueType::f32)) {
    number = static_cast<double>(load<float>(bytes));
  } else if (value.type == static_cast<uint32_t>(ValueType::f64)) {
    number = load<double>(bytes);
  } else {
    return wrong_type(key, value, "a floating-point number");
  }
  if (number >= least && number <= most) return number;  // false for NaN
  return {POLYKV_ERR_MODEL_FORMAT,
          format("read model %s: metadata %s is %g, allowed are %g to %g; %s",
                 quoted(name_).c_str(), quoted(key).c_str(), number, least, most, kFetchAgain)};
}

Result<bool> GgufFile::boolean(std::string_view key) const {
  POLYKV_ASSIGN_OR_RETURN(const Value value, find(key));
  if (value.type != static_cast<uint32_t>(ValueType::boolean)) {
    return wrong_type(key, value, "a boolean");
  }
  return head_[value.begin] != 0;
}

Result<std::string_view> GgufFile::string(std::string_view key) const {
  POLYKV_ASSIGN_OR_RETURN(const Value value, find(key));
  if (value.type != static_cast<uint32_t>(ValueType::string)) {
    return wrong_type(key, value, "a string");
  }
  const auto* text = reinterpret_cast<const char*>(head_.data() + value.begin);
  return std::string_view(text + sizeof(uint64_t), value.size - sizeof(uint64_t));
}

Result<uint64_t> GgufFile::array_count(std::string_view key) const {
  POLYKV_ASSIGN_OR_RETURN(const Value value, find(key));
  if (value.type != static_cast<uint32_t>(ValueType::array))
    return wrong_type(key, value, "an array");
  return value.count;
}

Result<std::vector<std::string_view>> GgufFile::strings(std::string_view key) const {
  POLYKV_ASSIGN_OR_RETURN(const Value value, find(key));
  if (value.type != static_cast<uint32_t>(ValueType::array) ||
      value.element_type != static_cast<uint32_t>(ValueType::string)) {
    return wrong_type(key, value, "an array of strings");
  }
  std::vector<std::string_view> texts;
  texts.reserve(value.count);
  const uint8_t* cursor = head_.data() + value.begin;  // walked and checked by the parser
  for (uint64_t i = 0; i < value.count; ++i) {
    const auto size = load<uint64_t>(cursor);
    texts.emplace_back(reinterpret_cast<const char*>(cursor + sizeof size), size);
    cursor += sizeof size + size;
  }
  return texts;
}

Result<std::vector<int32_t>> GgufFile::integers(std::string_view key) const {
  POLYKV_ASSIGN_OR_RETURN(const Value value, find(key));
  if (value.type != static_cast<uint32_t>(ValueType::array) ||
      (value.element_type != static_cast<uint32_t>(ValueType::i32) &&
       value.element_type != static_cast<uint32_t>(ValueType::u32))) {
    return wrong_type(key, value, "an array of 32-bit integers");
  }
  std::vector<int32_t> numbers(value.count);
  if (value.size != 0) std::memcpy(numbers.data(), head_.data() + value.begin, value.size);
  return numbers;
}

}  // namespace polykv
