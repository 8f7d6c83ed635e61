// The walk over an untrusted GGUF's head.
#include <algorithm>
#include <cinttypes>

#include "daemon/prefill/model/gguf.h"
#include "daemon/prefill/model/gguf_bytes.h"

namespace polykv {

using gguf_internal::kFetchAgain;
using gguf_internal::load;

namespace {

/// Bytes of a value of this type; 0 for strings, arrays and unknown types.
uint64_t scalar_bytes(uint32_t type) {
  static constexpr uint8_t kBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return type < sizeof kBytes ? kBytes[type] : 0;
}

}  // namespace

/// Walks the head once, from its first byte. The head is read in growing pieces into one buffer; it
/// may move until the walk is over, so keys are remembered by position and become views at the end.
class GgufFile::Parser {
 public:
  explicit Parser(const FileSource& file) : file_(file) {}

  Result<GgufFile> run() {
    result_.name_ = file_.name();
    head_limit_ = std::min<uint64_t>(file_.size_bytes(), GgufLimits::kHeadBytes);
    POLYKV_RETURN_IF_ERROR(read_magic_and_version());
    uint64_t tensor_count = 0;
    uint64_t metadata_count = 0;
    POLYKV_RETURN_IF_ERROR(read_count("tensor count", GgufLimits::kTensorCount, &tensor_count));
    POLYKV_RETURN_IF_ERROR(
        read_count("metadata count", GgufLimits::kMetadataCount, &metadata_count));
    for (uint64_t i = 0; i < metadata_count; ++i) POLYKV_RETURN_IF_ERROR(read_pair(i));
    for (uint64_t i = 0; i < tensor_count; ++i) POLYKV_RETURN_IF_ERROR(read_tensor(i));
    POLYKV_RETURN_IF_ERROR(index_metadata());
    POLYKV_RETURN_IF_ERROR(place_tensors());
    return std::move(result_);
  }

 private:
  struct Text {
    size_t begin = 0;
    size_t size = 0;
  };
  struct Pair {
    Text key;
    Value value;
  };

  std::string_view view(Text text) const {
    return {reinterpret_cast<const char*>(result_.head_.data()) + text.begin, text.size};
  }

  Status malformed(const std::string& what, const std::string& remedy = kFetchAgain) const {
    return {POLYKV_ERR_MODEL_FORMAT,
            "read model " + quoted(file_.name()) + ": " + what + "; " + remedy};
  }
  Status unsupported(const std::string& what, const std::string& remedy) const {
    return {POLYKV_ERR_MODEL_UNSUPPORTED,
            "read model " + quoted(file_.name()) + ": " + what + "; " + remedy};
  }

  /// Makes `count` bytes at the cursor available, and returns where they are.
  Status take(uint64_t count, const char* what, const uint8_t** bytes) {
    std::vector<uint8_t>& head = result_.head_;
    if (count > head.size() - cursor_) {
      if (count > head_limit_ - cursor_) {
        if (file_.size_bytes() > head_limit_) {
          return malformed(format("%s ends after %" PRIu64
                                  " bytes, the most that metadata and tensor table may have",
                                  what, head_limit_));
        }
        return malformed(format("%s of %" PRIu64 " bytes at offset %zu is beyond the file's end",
                                what, count, cursor_));
      }
      // A vocabulary makes a head of megabytes; without one 128 KiB are plenty.
      static constexpr uint64_t kFirstPieceBytes = uint64_t{128} << 10;
      static constexpr uint64_t kSecondSizeBytes = uint64_t{2} << 20;
      const size_t old_size = head.size();
      const uint64_t grown =
          old_size == 0 ? kFirstPieceBytes : std::max(2 * uint64_t{old_size}, kSecondSizeBytes);
      const uint64_t wanted = std::max<uint64_t>(cursor_ + count, grown);
      head.resize(std::min(wanted, head_limit_));
      POLYKV_RETURN_IF_ERROR(file_.read(old_size, std::span(head).subspan(old_size)));
    }
    *bytes = head.data() + cursor_;
    cursor_ += count;
    return Status::ok();
  }

  template <typename T>
  Status read_number(const char* what, T* value) {
    const uint8_t* bytes = nullptr;
    POLYKV_RETURN_IF_ERROR(take(sizeof(T), what, &bytes));
    *value = load<T>(bytes);
    return Status::ok();
  }

  Status read_count(const char* what, uint64_t most, uint64_t* count) {
    POLYKV_RETURN_IF_ERROR(read_number(what, count));
    if (*count <= most) return Status::ok();
    return malformed(
        format("%s is %" PRIu64 ", at most %" PRIu64 " are allowed", what, *count, most));
  }

  Status read_string(const char* what, uint64_t most, Text* text) {
    uint64_t size = 0;
    POLYKV_RETURN_IF_ERROR(read_number(what, &size));
    if (size > most) {
      return malformed(format("the length of %s is %" PRIu64 ", at most %" PRIu64 " are allowed",
                              what, size, most));
    }
    const uint8_t* bytes = nullptr;
    POLYKV_RETURN_IF_ERROR(take(size, what, &bytes));
    *text = {cursor_ - size, size};
    return Status::ok();
  }

  /// The common case of a vocabulary's hundred thousand strings: whole in the buffer and of an allowed length.
  bool skip_buffered_string() {
    const size_t available = result_.head_.size() - cursor_;
    if (available < sizeof(uint64_t)) return false;
    const auto size = load<uint64_t>(result_.head_.data() + cursor_);
    if (size > GgufLimits::kStringBytes || size > available - sizeof size) return false;
    cursor_ += sizeof size + size;
    return true;
  }

  Status read_magic_and_version() {
    const uint8_t* magic = nullptr;
    POLYKV_RETURN_IF_ERROR(take(4, "magic", &magic));
    if (std::memcmp(magic, "GGUF", 4) != 0) {
      return malformed("it does not begin with 'GGUF'", "give the path of a GGUF file");
    }
    uint32_t version = 0;
    POLYKV_RETURN_IF_ERROR(read_number("version", &version));
    if (version == 3) return Status::ok();
    if (version == 0x03000000U) {
      return unsupported("it is big-endian", "convert the model to little-endian");
    }
    return unsupported(format("GGUF version %u is not 3", version),
                       "convert the model with a current tool");
  }

  Status read_pair(uint64_t index) {
    Pair pair;
    POLYKV_RETURN_IF_ERROR(read_string("a metadata key", GgufLimits::kKeyBytes, &pair.key));
    if (pair.key.size == 0)
      return malformed(format("the key of metadata %" PRIu64 " is empty", index));
    Value& value = pair.value;
    POLYKV_RETURN_IF_ERROR(read_number("a value type", &value.type));
    const Status status = value.type == static_cast<uint32_t>(ValueType::array)
                              ? read_array(&value)
                              : read_elements(value.type, 1, &value);
    if (!status.is_ok()) {
      return {status.code(), status.message() + " (in metadata " + quoted(view(pair.key)) + ")"};
    }
    pairs_.push_back(pair);
    return Status::ok();
  }

  /// After the walk, when the buffer has its final address.
  Status index_metadata() {
    for (const Pair& pair : pairs_) {
      if (!result_.values_.emplace(view(pair.key), pair.value).second) {
        return malformed("metadata " + quoted(view(pair.key)) + " is there twice");
      }
    }
    return Status::ok();
  }

  Status read_array(Value* value) {
    POLYKV_RETURN_IF_ERROR(read_number("an array's element type", &value->element_type));
    if (value->element_type == static_cast<uint32_t>(ValueType::array)) {
      return unsupported("an array of arrays", "convert the model with a current tool");
    }
    POLYKV_RETURN_IF_ERROR(read_count("an array's count", GgufLimits::kArrayCount, &value->count));
    return read_elements(value->element_type, value->count, value);
  }

  Status read_elements(uint32_t type, uint64_t count, Value* value) {
    const uint8_t* bytes = nullptr;
    value->begin = cursor_;
    if (type == static_cast<uint32_t>(ValueType::string)) {
      for (uint64_t i = 0; i < count; ++i) {
        if (skip_buffered_string()) continue;
        Text text;
        POLYKV_RETURN_IF_ERROR(read_string("a string", GgufLimits::kStringBytes, &text));
      }
    } else if (scalar_bytes(type) != 0) {
      POLYKV_RETURN_IF_ERROR(take(count * scalar_bytes(type), "a value", &bytes));
      if (type == static_cast<uint32_t>(ValueType::boolean) &&
          std::any_of(bytes, bytes + count, [](uint8_t byte) { return byte > 1; })) {
        return malformed("a boolean is neither 0 nor 1");
      }
    } else {
      return malformed(format("value type %u is unknown", type));
    }
    value->size = cursor_ - value->begin;
    return Status::ok();
  }

  Status read_tensor(uint64_t index) {
    TensorInfo tensor;
    Text name;
    POLYKV_RETURN_IF_ERROR(read_string("a tensor's name", GgufLimits::kTensorNameBytes, &name));
    if (name.size == 0) return malformed(format("the name of tensor %" PRIu64 " is empty", index));
    tensor.name = view(name);
    const auto label = [&] { return "tensor " + quoted(tensor.name); };
    POLYKV_RETURN_IF_ERROR(read_number("a dimension count", &tensor.dimension_count));
    if (tensor.dimension_count == 0 || tensor.dimension_count > GgufLimits::kDimensionCount) {
      return malformed(format("%s has %u dimensions, 1 to %u are allowed", label().c_str(),
                              tensor.dimension_count, GgufLimits::kDimensionCount));
    }
    tensor.value_count = 1;
    for (uint32_t i = 0; i < tensor.dimension_count; ++i) {
      uint64_t& dimension = tensor.dimensions[i];
      POLYKV_RETURN_IF_ERROR(read_number("a dimension", &dimension));
      if (dimension == 0 || dimension > GgufLimits::kTensorValues / tensor.value_count) {
        return malformed(format("dimension %u of %s is %" PRIu64
                                "; the whole may have 1 to %" PRIu64 " values",
                                i, label().c_str(), dimension, GgufLimits::kTensorValues));
      }
      tensor.value_count *= dimension;
    }
    uint32_t type_number = 0;
    POLYKV_RETURN_IF_ERROR(read_number("a tensor type", &type_number));
    const auto type = tensor_type_from_number(type_number);
    if (!type) {
      return unsupported(format("%s has type number %u", label().c_str(), type_number),
                         "convert the model to F32, F16, BF16, Q8_0, Q4_0 or Q4_1");
    }
    tensor.type = *type;
    const uint32_t block_values = tensor_type_block_values(*type);
    if (tensor.dimensions[0] % block_values != 0) {
      return malformed(format("rows of %s have %" PRIu64 " values, no multiple of %s's %u",
                              label().c_str(), tensor.dimensions[0], tensor_type_name(*type),
                              block_values));
    }
    tensor.size_bytes = tensor.value_count / block_values * tensor_type_block_bytes(*type);
    POLYKV_RETURN_IF_ERROR(read_number("a tensor's offset", &tensor.offset_bytes));
    if (!result_.tensor_index_.emplace(tensor.name, result_.tensors_.size()).second) {
      return malformed(label() + " is there twice");
    }
    result_.tensors_.push_back(std::move(tensor));
    return Status::ok();
  }

  /// Turns relative offsets into checked absolute ones. No two tensors share a byte.
  Status place_tensors() {
    uint64_t alignment = 32;
    if (result_.has("general.alignment")) {
      POLYKV_ASSIGN_OR_RETURN(alignment,
                              result_.integer("general.alignment", 1, GgufLimits::kAlignmentBytes));
      if ((alignment & (alignment - 1)) != 0) {
        return malformed(format("general.alignment is %" PRIu64 ", no power of two", alignment));
      }
    }
    const uint64_t data_begin = (cursor_ + alignment - 1) / alignment * alignment;
    const uint64_t file_bytes = file_.size_bytes();
    std::vector<const TensorInfo*> by_offset;
    for (TensorInfo& tensor : result_.tensors_) {
      const auto label = [&] { return "tensor " + quoted(tensor.name); };
      if (tensor.offset_bytes % alignment != 0) {
        return malformed(format("the offset of %s is %" PRIu64
                                ", no multiple of the alignment %" PRIu64,
                                label().c_str(), tensor.offset_bytes, alignment));
      }
      if (data_begin > file_bytes || tensor.offset_bytes > file_bytes - data_begin ||
          tensor.size_bytes > file_bytes - data_begin - tensor.offset_bytes) {
        return malformed(format("%s has %" PRIu64 " bytes at %" PRIu64 " + %" PRIu64
                                ", beyond the file's end at %" PRIu64,
                                label().c_str(), tensor.size_bytes, data_begin, tensor.offset_bytes,
                                file_bytes));
      }
      tensor.offset_bytes += data_begin;
      by_offset.push_back(&tensor);
    }
    std::sort(by_offset.begin(), by_offset.end(), [](const TensorInfo* a, const TensorInfo* b) {
      return a->offset_bytes < b->offset_bytes;
    });
    for (size_t i = 1; i < by_offset.size(); ++i) {
      const TensorInfo& before = *by_offset[i - 1];
      if (before.offset_bytes + before.size_bytes > by_offset[i]->offset_bytes) {
        return malformed("tensors " + quoted(before.name) + " and " + quoted(by_offset[i]->name) +
                         " overlap");
      }
    }
    return Status::ok();
  }

  const FileSource& file_;
  GgufFile result_;
  std::vector<Pair> pairs_;
  uint64_t head_limit_ = 0;
  size_t cursor_ = 0;
};

Result<GgufFile> GgufFile::parse(const FileSource& file) {
  return Parser(file).run();
}

}  // namespace polykv
