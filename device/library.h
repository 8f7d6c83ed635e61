// Loads the library that holds a Runtime, when it is first needed. It is never unloaded: the driver
// keeps threads of its own.
#pragma once

#include <string>

#include "device/runtime.h"

namespace polykv::device {

/// What is looked for where nobody names a library.
inline constexpr const char* kDefaultLibrary = "libpolykv_cuda.so.0";

/// A function that the library exports, loaded as load_runtime() does; looked up once, so that it may be asked for at
/// each call. Thread-safe. POLYKV_ERR_UNSUPPORTED.
Result<void*> find_function(const std::string& library, const char* name);

/// Of a file name (searched as the dynamic loader does) or a path. Thread-safe; the runtime lives as
/// long as the process. POLYKV_ERR_UNSUPPORTED: it is not there, or of another version.
Result<Runtime*> load_runtime(const std::string& library);

}  // namespace polykv::device
