// The files that a command line names.
#pragma once

#include <optional>
#include <string>

#include "common/fd.h"
#include "common/files.h"
#include "common/result.h"

namespace polykv::cli {

/// Opens a regular file, or with "-" reads standard input to its end into a sealed memfd. `what`
/// ("text", "model") is for messages. POLYKV_ERR_NOT_FOUND, POLYKV_ERR_PERMISSION, or
/// POLYKV_ERR_INVALID_ARGUMENT for a folder or a device.
Result<UniqueFd> open_input(const std::string& path, const char* what);
/// The same for a model, which has to be a regular file.
Result<UniqueFd> open_model_file(const std::string& path);

/// All of an input, at most max_bytes (POLYKV_ERR_LIMIT).
Result<std::string> read_input(const std::string& path, const char* what, uint64_t max_bytes);

/// A model file, or a name of polykvd's configuration.
struct ModelArgument {
  UniqueFd file;     // or:
  std::string name;  // of the configuration
};
/// A path when it contains a '/', ends in ".gguf" or is there as a file; else a name.
Result<ModelArgument> open_model(const std::string& model);

/// Size of a file or memfd; nothing for what has none.
std::optional<uint64_t> size_of(const UniqueFd& fd);

}  // namespace polykv::cli
