#include "daemon/prefill/transformer/torch_gpu.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <exception>
#include <string>
#include <string_view>

namespace polykv {

namespace {

constexpr std::string_view kLinked = "libtorch_cpu.so";
constexpr const char* kWanted = "libtorch_cuda.so";

Status unsupported(const std::string& cause) {
  return {POLYKV_ERR_UNSUPPORTED, "use a GPU with libtorch: " + cause};
}

/// The folder of the libtorch that is loaded, with its slash; empty when the loader does not tell.
std::string torch_folder() {
  std::string folder;
  const auto look = [](dl_phdr_info* info, size_t, void* found) {
    const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
    const size_t slash = path.rfind('/');
    // Debian's has its version behind the name.
    if (slash == std::string::npos || path.compare(slash + 1, kLinked.size(), kLinked) != 0)
      return 0;
    *static_cast<std::string*>(found) = path.substr(0, slash + 1);
    return 1;
  };
  ::dl_iterate_phdr(look, &folder);
  return folder;
}

}  // namespace

Status load_torch_gpu() {
  const std::string folder = torch_folder();
  const std::string path = folder + kWanted;
  if (folder.empty() || ::access(path.c_str(), F_OK) != 0) {
    return unsupported(
        "the libtorch in " + (folder.empty() ? "this process" : folder) + " has no " + kWanted +
        "; build polykv with a torch that has CUDA, such as pip's (CMAKE_PREFIX_PATH=.../torch)");
  }
  if (::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE) != nullptr)
    return Status::ok();
  const char* why = ::dlerror();  // NOLINT(concurrency-mt-unsafe): of this thread
  return unsupported(why == nullptr ? path + " cannot be loaded" : why);
}

Result<TorchDevice> torch_gpu(int index) {
  try {
    if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA))
      return unsupported("libtorch has no CUDA device");
    const int count = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
    if (index < count) return TorchDevice{true, index};
    return unsupported(format(
        "libtorch sees %d GPUs, and number %d is wanted; see nvidia-smi and CUDA_VISIBLE_DEVICES",
        count, index));
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return unsupported(text.substr(0, text.find('\n')));
  }
}

}  // namespace polykv
