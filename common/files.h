// Files that a person names: on a command line, in a configuration.
#pragma once

#include <cstdint>
#include <string>

#include "common/fd.h"
#include "common/result.h"

namespace polykv {

/// A text file has at most so many bytes, as for polykv-prefill.
inline constexpr uint64_t kMaxTextBytes = uint64_t{64} << 20;

/// Opens a file to read. `what` ("text", "model") is for messages. POLYKV_ERR_NOT_FOUND,
/// POLYKV_ERR_PERMISSION, POLYKV_ERR_INVALID_ARGUMENT for a folder, POLYKV_ERR_SYSTEM.
Result<UniqueFd> open_file(const std::string& path, const char* what);

/// All that is left to read, at most max_bytes (POLYKV_ERR_LIMIT); path and what are for messages.
Result<std::string> read_file(const UniqueFd& fd, const std::string& path, const char* what,
                              uint64_t max_bytes);
/// Both.
Result<std::string> read_file(const std::string& path, const char* what, uint64_t max_bytes);

}  // namespace polykv
