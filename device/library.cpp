#include "device/library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>

namespace polykv::device {

std::string uuid_text(const Uuid& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += format("%02x", uuid[i]);
  }
  return text;
}

namespace {

Status unsupported(const std::string& library, const char* why) {
  return {
      POLYKV_ERR_UNSUPPORTED,
      format("load '%s': %s; install polykv's CUDA library (libpolykv_cuda) of the same version, "
             "or keep documents in host memory (polykvd --backing memfd)",
             library.c_str(), why)};
}

}  // namespace

Result<void*> find_function(const std::string& library, const char* name) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, std::string>, void*> found;  // guarded
  const std::lock_guard lock(mutex);
  if (const auto known = found.find({library, name}); known != found.end()) return known->second;
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* why = ::dlerror();  // NOLINT(concurrency-mt-unsafe): of this thread
    return unsupported(library, why == nullptr ? "the dynamic loader refuses it" : why);
  }
  void* function = ::dlsym(handle, name);
  ::dlclose(handle);  // it stays
  if (function == nullptr) return unsupported(library, format("it has no %s", name).c_str());
  found.emplace(std::pair(library, name), function);
  return function;
}

Result<Runtime*> load_runtime(const std::string& library) {
  POLYKV_ASSIGN_OR_RETURN(void* const factory, find_function(library, kRuntimeFactoryName));
  Runtime* runtime = reinterpret_cast<RuntimeFactory>(factory)(kRuntimeVersion);
  if (runtime == nullptr)
    return unsupported(library, "it is of another version, or finds no device");
  return runtime;
}

}  // namespace polykv::device
