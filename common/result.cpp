#include "common/result.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace polykv {

const char* status_name(polykv_status code) {
  switch (code) {
#define POLYKV_CASE(name, number, text) \
  case POLYKV_##name:                   \
    return "POLYKV_" #name;
    POLYKV_STATUS_LIST(POLYKV_CASE)
#undef POLYKV_CASE
  }
  return "POLYKV_ERR_UNKNOWN";
}

const char* status_text(polykv_status code) {
  switch (code) {
#define POLYKV_CASE(name, number, text) \
  case POLYKV_##name:                   \
    return text;
    POLYKV_STATUS_LIST(POLYKV_CASE)
#undef POLYKV_CASE
  }
  return "unknown status code";
}

std::string format(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  va_list copy;
  va_copy(copy, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::string text(length > 0 ? static_cast<size_t>(length) : 0, '\0');
  if (length > 0) std::vsnprintf(text.data(), text.size() + 1, pattern, copy);
  va_end(copy);
  return text;
}

Status system_error(const std::string& operation, int error_number, const std::string& remedy) {
  char buffer[128];
  // The GNU strerror_r: thread-safe, may ignore the buffer.
  const char* text = strerror_r(error_number, buffer, sizeof buffer);
  return {POLYKV_ERR_SYSTEM, operation + ": " + text + (remedy.empty() ? "" : "; " + remedy)};
}

}  // namespace polykv
