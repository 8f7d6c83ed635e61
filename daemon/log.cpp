#include "daemon/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/sinks/systemd_sink.h>
#include <spdlog/spdlog.h>

#include <array>
#include <cstdarg>
#include <cstdio>

namespace polykv::daemon {

namespace {

void write(spdlog::level::level_enum level, const char* pattern, va_list arguments) {
  spdlog::logger& logger = *spdlog::default_logger_raw();
  if (!logger.should_log(level)) return;
  std::array<char, 1024> line{};  // a longer one is cut
  std::vsnprintf(line.data(), line.size(), pattern, arguments);
  for (char* c = line.data(); *c != '\0'; ++c) {
    if (static_cast<unsigned char>(*c) < 0x20 || *c == 0x7f) *c = '?';
  }
  logger.log(level, spdlog::string_view_t(line.data()));
}

}  // namespace

void start_log(bool to_journal, const std::string& level) {
  auto logger =
      to_journal ? spdlog::systemd_logger_mt("polykvd") : spdlog::stderr_color_mt("polykvd");
  if (to_journal) logger->set_pattern("%v");
  spdlog::set_default_logger(std::move(logger));
  spdlog::set_level(spdlog::level::from_str(level));
}

void log_debug(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  write(spdlog::level::debug, pattern, arguments);
  va_end(arguments);
}

void log_info(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  write(spdlog::level::info, pattern, arguments);
  va_end(arguments);
}

void log_warning(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  write(spdlog::level::warn, pattern, arguments);
  va_end(arguments);
}

void log_error(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  write(spdlog::level::err, pattern, arguments);
  va_end(arguments);
}

}  // namespace polykv::daemon
