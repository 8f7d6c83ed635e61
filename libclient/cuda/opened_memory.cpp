#include "libclient/cuda/opened_memory.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "device/library.h"
#include "libclient/process.h"

namespace polykv::lib {

namespace {

struct Entry {
  void* pointer = nullptr;
  uint64_t count = 0;
};

/// All that is open in this process. Opening and closing one allocation must not race, and both are
/// short: one lock for all. Never destroyed: the driver may end before our static objects do.
struct Registry {
  std::mutex mutex;
  std::map<RemoteMemory, Entry> entries;  // guarded
};
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

std::string version_text(int version) {
  return format("%d.%d", version / 1000, version % 1000 / 10);
}

}  // namespace

std::string client_library() {
  const char* named = ::secure_getenv("POLYKV_CUDA_LIBRARY");
  return named == nullptr || *named == '\0' ? device::kDefaultLibrary : named;
}

Result<device::Runtime*> client_runtime(uint32_t daemon_driver) {
  POLYKV_ASSIGN_OR_RETURN(device::Runtime* const runtime, device::load_runtime(client_library()));
  POLYKV_ASSIGN_OR_RETURN(const device::Versions versions, runtime->versions());
  if (daemon_driver != 0 && static_cast<uint32_t>(versions.driver) != daemon_driver) {
    return {POLYKV_ERR_VERSION,
            "use device memory: the NVIDIA driver of this process is for CUDA " +
                version_text(versions.driver) + ", polykvd's for CUDA " +
                version_text(static_cast<int>(daemon_driver)) +
                "; give both the same libcuda (containers bring one of their own)"};
  }
  return runtime;
}

Result<Gpu> find_gpu(device::Runtime& runtime, const device::Uuid& uuid) {
  POLYKV_ASSIGN_OR_RETURN(const std::vector<device::DeviceInfo> devices, runtime.devices());
  std::string seen;
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].uuid == uuid) return Gpu{&runtime, static_cast<int>(i), devices[i]};
    seen += (seen.empty() ? "" : ", ") + device::uuid_text(devices[i].uuid);
  }
  return {POLYKV_ERR_WRONG_DEVICE, "use device memory: the document is on " +
                                       device::uuid_text(uuid) + ", this process sees " +
                                       (seen.empty() ? "no GPU" : seen) +
                                       "; let it see that GPU (CUDA_VISIBLE_DEVICES)"};
}

Result<OpenedMemory> OpenedMemory::open(const Gpu& gpu, const RemoteMemory& memory) {
  OpenedMemory opened;
  opened.gpu_ = gpu;
  opened.memory_ = memory;
  opened.generation_ = process_generation();
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  Entry& entry = all.entries[memory];
  if (entry.count == 0) {
    // Which device is current is this thread's own, and may be anything.
    Status status = gpu.runtime->use_device(gpu.index);
    Result<void*> pointer(nullptr);
    if (status.is_ok()) {
      pointer = gpu.runtime->open(memory.handle);
      status = pointer.status();
    }
    if (!status.is_ok()) {
      all.entries.erase(memory);
      return status.with_context("open a segment on " + gpu.info.name);
    }
    entry.pointer = *pointer;
  }
  ++entry.count;
  opened.pointer_ = entry.pointer;
  return opened;
}

OpenedMemory::OpenedMemory(OpenedMemory&& other) noexcept
    : gpu_(std::move(other.gpu_)),
      memory_(other.memory_),
      pointer_(std::exchange(other.pointer_, nullptr)),
      generation_(other.generation_) {}

OpenedMemory& OpenedMemory::operator=(OpenedMemory&& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(memory_, other.memory_);
  std::swap(pointer_, other.pointer_);
  std::swap(generation_, other.generation_);
  return *this;
}

OpenedMemory::~OpenedMemory() {
  static_cast<void>(close().is_ok());
}

Status OpenedMemory::close() {
  void* const pointer = std::exchange(pointer_, nullptr);
  // The context did not come along into a child, and neither may the lock be touched there.
  if (pointer == nullptr || process_generation() != generation_) return Status::ok();
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.entries.find(memory_);
  assert(found != all.entries.end() && found->second.pointer == pointer);
  if (--found->second.count > 0) return Status::ok();
  all.entries.erase(found);
  POLYKV_RETURN_IF_ERROR(gpu_.runtime->use_device(gpu_.index));
  POLYKV_RETURN_IF_ERROR(gpu_.runtime->synchronize_device());
  return gpu_.runtime->close(pointer);
}

}  // namespace polykv::lib
