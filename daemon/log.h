// The daemon's log: spdlog, to stderr or to the journal. Its headers are templates that would be
// most of the build's time, so they stay in log.cpp.
#pragma once

#include <string>

namespace polykv::daemon {

/// Once, before anything is logged. level: trace, debug, info, warn, error or off.
/// to_journal: with levels as the journal knows them, and without a time of our own.
void start_log(bool to_journal, const std::string& level);

/// printf-style; thread-safe. What clients sent may be in it: control characters are replaced.
void log_debug(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
void log_info(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
void log_warning(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
void log_error(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

}  // namespace polykv::daemon
