// Status and Result<T>: how every function of polykv reports failure. No exception crosses a
// module's edge.
//
// An error names the operation, the object, the cause and the remedy, in that order, in one line:
//   "acquire 'gpl3': no document of that name; `polykvctl ls` lists them"
#pragma once

#include <cassert>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "polykv/status.h"

namespace polykv {

/// A status code with its message. Empty message for POLYKV_OK. Cheap to move; thread-compatible.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(polykv_status code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status ok() { return {}; }
  bool is_ok() const { return code_ == POLYKV_OK; }
  polykv_status code() const { return code_; }
  const std::string& message() const { return message_; }

  /// The same code, with "prefix: " put before the message: callers add what only they know.
  Status with_context(const std::string& prefix) const {
    return is_ok() ? Status() : Status(code_, prefix + ": " + message_);
  }

 private:
  polykv_status code_ = POLYKV_OK;
  std::string message_;
};

/// Either a value or a failing Status.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    assert(!status_.is_ok() && "a Result without a value needs a failing Status");
  }
  Result(polykv_status code, std::string message) : Result(Status(code, std::move(message))) {}

  bool is_ok() const { return value_.has_value(); }
  explicit operator bool() const { return is_ok(); }
  const Status& status() const { return status_; }
  T& value() & { return check(), *value_; }
  const T& value() const& { return check(), *value_; }
  T&& value() && { return check(), std::move(*value_); }
  T* operator->() { return check(), &*value_; }
  const T* operator->() const { return check(), &*value_; }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }

 private:
  void check() const { assert(value_.has_value() && "value() of a failed Result"); }

  std::optional<T> value_;
  Status status_;
};

/// The name of a code as the C ABI spells it ("POLYKV_ERR_BUSY"), and its text. Static storage.
const char* status_name(polykv_status code);
const char* status_text(polykv_status code);

/// printf into a std::string. Used for error texts.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

/// "operation object: cause (errno text); remedy" of a failed system call. Remedy may be empty.
Status system_error(const std::string& operation, int error_number, const std::string& remedy = "");

}  // namespace polykv

/// Returns the Status of a failing expression from the enclosing function.
#define POLYKV_RETURN_IF_ERROR(expression)              \
  do {                                                  \
    ::polykv::Status polykv_status_ = (expression);     \
    if (!polykv_status_.is_ok()) return polykv_status_; \
  } while (false)

#define POLYKV_CONCAT_(a, b) a##b
#define POLYKV_CONCAT(a, b) POLYKV_CONCAT_(a, b)
/// POLYKV_ASSIGN_OR_RETURN(auto x, f()): declares or assigns x, or returns f's Status.
#define POLYKV_ASSIGN_OR_RETURN(target, expression) \
  POLYKV_ASSIGN_OR_RETURN_(POLYKV_CONCAT(polykv_result_, __LINE__), target, expression)
#define POLYKV_ASSIGN_OR_RETURN_(result, target, expression) \
  auto result = (expression);                                \
  if (!result.is_ok()) return result.status();               \
  target = std::move(result).value()
