// GGUF version 3, little-endian: metadata and tensor table of an untrusted file.
//
//   "GGUF" [u32 version = 3] [u64 tensor count] [u64 metadata count]
//   metadata count x  [string key] [u32 value type] [value]
//   tensor count   x  [string name] [u32 n] [n x u64 dimension, fastest first] [u32 type]
//                     [u64 offset]
//   zero bytes up to a multiple of general.alignment (32 if absent), then the tensors' data;
//   offsets count from here
//
//   string = [u64 bytes][bytes]     array = [u32 element type][u64 count][elements]
//
// Everything is checked against the file's size and the limits below before it is used. Errors:
// POLYKV_ERR_MODEL_FORMAT (malformed, truncated), POLYKV_ERR_MODEL_UNSUPPORTED (well formed, but
// not for us).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/result.h"
#include "daemon/prefill/model/file_source.h"
#include "daemon/prefill/model/tensor_type.h"

namespace polykv {

struct GgufLimits {
  static constexpr uint64_t kHeadBytes = uint64_t{256} << 20;  // metadata and tensor table together
  static constexpr uint64_t kMetadataCount = 4096;
  static constexpr uint64_t kTensorCount = 65536;
  static constexpr uint64_t kKeyBytes = 256;
  static constexpr uint64_t kTensorNameBytes = 256;
  static constexpr uint64_t kStringBytes = uint64_t{4} << 20;
  static constexpr uint64_t kArrayCount = uint64_t{1} << 22;
  static constexpr uint32_t kDimensionCount = 4;
  static constexpr uint64_t kTensorValues = uint64_t{1} << 40;
  static constexpr uint64_t kAlignmentBytes = uint64_t{1} << 16;
};

struct TensorInfo {
  std::string name;
  TensorType type = TensorType::f32;
  uint32_t dimension_count = 0;
  std::array<uint64_t, GgufLimits::kDimensionCount> dimensions{1, 1, 1,
                                                               1};  // [0] is the row length
  uint64_t value_count = 0;
  uint64_t offset_bytes =
      0;  // from the file's start; offset_bytes + size_bytes lies within the file
  uint64_t size_bytes = 0;
};

/// Immutable after parse(); thread-safe. Strings that it hands out live as long as the GgufFile.
class GgufFile {
 public:
  static Result<GgufFile> parse(const FileSource& file);

  GgufFile(GgufFile&&) noexcept = default;
  GgufFile& operator=(GgufFile&&) noexcept = default;

  const std::string& name() const { return name_; }
  const std::vector<TensorInfo>& tensors() const {
    return tensors_;
  }                                                       // in the file's order, names unique
  const TensorInfo* tensor(std::string_view name) const;  // nullptr: none of that name

  bool has(std::string_view key) const { return values_.contains(key); }
  /// A missing key or one of another type is POLYKV_ERR_MODEL_FORMAT, a number outside [least,
  /// most] too.
  Result<uint64_t> integer(std::string_view key, uint64_t least, uint64_t most) const;
  Result<double> number(std::string_view key, double least, double most) const;
  Result<bool> boolean(std::string_view key) const;
  Result<std::string_view> string(std::string_view key) const;
  Result<std::vector<std::string_view>> strings(std::string_view key) const;
  Result<uint64_t> array_count(std::string_view key) const;
  Result<std::vector<int32_t>> integers(std::string_view key) const;  // an array of int32 or uint32

 private:
  enum class ValueType : uint32_t {
    u8 = 0,
    i8 = 1,
    u16 = 2,
    i16 = 3,
    u32 = 4,
    i32 = 5,
    f32 = 6,
    boolean = 7,
    string = 8,
    array = 9,
    u64 = 10,
    i64 = 11,
    f64 = 12,
  };
  struct Value {
    uint32_t type = 0;
    uint32_t element_type = 0;  // of an array
    uint64_t count = 1;         // elements of an array
    size_t begin = 0;  // the first byte of the value (after an array's or string's header) in head_
    size_t size = 0;
  };
  class Parser;

  GgufFile() = default;
  Result<Value> find(std::string_view key) const;
  Status wrong_type(std::string_view key, const Value& value, const char* expected) const;

  std::string name_;
  std::vector<uint8_t>
      head_;  // the bytes up to the tensor table's end; keys and strings point into it
  std::unordered_map<std::string_view, Value> values_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, size_t> tensor_index_;
};

}  // namespace polykv
