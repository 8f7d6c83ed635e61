// libpolykv_cuda_emulated.so: Runtime over files that processes share, with CUDA's rules. Tests alone
// load it. See emulated_state.h for the files.
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "device/runtime.h"
#include "tests/support/emulated_state.h"

namespace polykv::test {

namespace {

using device::DeviceInfo;
using device::IpcHandle;
using device::MemoryInfo;
using device::Uuid;
using device::Versions;

constexpr uint64_t kMagic = 0x6564'6c75'6d65'6b70;
/// What the memory of a dead exporter reads as: CUDA promises nothing, so it must not look right.
constexpr uint8_t kGarbage = 0xdb;

struct WireHandle {
  uint64_t magic;
  uint64_t id;
  uint64_t nonce;
  uint8_t unused[40];
};
static_assert(sizeof(WireHandle) == sizeof(IpcHandle));

/// The order of devices is a process's own, by CUDA_VISIBLE_DEVICES ("1,0").
std::vector<uint32_t> visible_devices(uint32_t count) {
  std::vector<uint32_t> visible;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) {
    for (uint32_t i = 0; i < count; ++i) visible.push_back(i);
    return visible;
  }
  std::istringstream list(text);
  for (std::string number; std::getline(list, number, ',');) {
    const auto device = static_cast<uint32_t>(std::strtoul(number.c_str(), nullptr, 10));
    if (device < count) visible.push_back(device);
  }
  return visible;
}

Uuid uuid_of(uint32_t device) {
  Uuid uuid{};
  uuid[0] = 0xe0;
  uuid[15] = static_cast<uint8_t>(device + 1);
  return uuid;
}

struct Stream {
  std::set<const void*> in_use;  // device memory that its pending work reads or writes
};

/// Where an allocation is in this process.
struct Mapping {
  uint64_t id = 0;
  uint64_t size_bytes = 0;
  uint32_t device = 0;
  bool is_own = false;
  uint32_t open_count = 0;
};

thread_local int current_device = -1;

class EmulatedRuntime final : public device::Runtime {
 public:
  explicit EmulatedRuntime(std::string folder)
      : folder_(std::move(folder)), file_(folder_), self_(EmulatedProcess::self()) {}

  Result<Versions> versions() override {
    POLYKV_RETURN_IF_ERROR(check_process("versions"));
    return Versions{faults().has("other_driver") ? 12080 : 13000, 13000};
  }

  Result<std::vector<DeviceInfo>> devices() override {
    POLYKV_RETURN_IF_ERROR(check_process("devices"));
    const bool is_missing = faults().has("no_driver");
    EmulatedStateFile::Guard state(file_);
    if (is_missing) {
      ++state->missing_total;
      return {POLYKV_ERR_UNSUPPORTED, "count GPUs: no CUDA-capable device is detected"};
    }
    std::vector<DeviceInfo> devices;
    for (const uint32_t device : visible_devices(state->device_count))
      devices.push_back(
          {uuid_of(device), "Emulated GPU " + std::to_string(device), state->device_bytes});
    return devices;
  }

  Status use_device(int index) override {
    POLYKV_RETURN_IF_ERROR(check_process("use_device"));
    EmulatedStateFile::Guard state(file_);
    const auto visible = visible_devices(state->device_count);
    if (index < 0 || static_cast<size_t>(index) >= visible.size())
      return {POLYKV_ERR_WRONG_DEVICE, "choose a GPU: invalid device ordinal"};
    current_device = static_cast<int>(visible[static_cast<size_t>(index)]);
    return Status::ok();
  }

  Result<MemoryInfo> memory() override {
    POLYKV_RETURN_IF_ERROR(check_context("memory"));
    if (faults().has("memory_unknown"))
      return {POLYKV_ERR_UNSUPPORTED, "memory: no CUDA-capable device is detected"};
    EmulatedStateFile::Guard state(file_);
    sweep(*state);
    return MemoryInfo{free_bytes(*state), state->device_bytes};
  }

  Result<void*> allocate(uint64_t size_bytes) override {
    POLYKV_RETURN_IF_ERROR(check_context("allocate"));
    if (size_bytes == 0 || size_bytes % device::kGranularityBytes != 0)
      violation("allocate: " + std::to_string(size_bytes) + " is no multiple of 2 MiB");
    const std::lock_guard lock(mutex_);
    EmulatedStateFile::Guard state(file_);
    sweep(*state);
    if (faults().has("out_of_memory") || size_bytes > free_bytes(*state))
      return {POLYKV_ERR_NO_MEMORY, "allocate device memory: out of memory"};
    auto* const end = std::end(state->allocations);
    auto* slot = std::find_if(std::begin(state->allocations), end,
                              [](const EmulatedAllocation& a) { return a.id == 0; });
    if (slot == end) return {POLYKV_ERR_NO_MEMORY, "allocate device memory: too many allocations"};
    *slot = EmulatedAllocation{};
    slot->id = state->next_id++;
    slot->nonce = std::random_device()();
    slot->size_bytes = size_bytes;
    slot->device = static_cast<uint32_t>(current_device);
    slot->owner_uid = ::geteuid();
    slot->owner = self_;
    ++state->allocated_total;
    const std::string path = memory_path(slot->id);
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size_bytes)) != 0) {
      slot->id = 0;
      if (fd >= 0) ::close(fd);
      return {POLYKV_ERR_NO_MEMORY, "allocate device memory: no room for the emulation"};
    }
    void* pointer = map(fd, size_bytes);
    // What was there before: somebody else's bytes, as far as anybody knows.
    std::memset(pointer, 0xa5, size_bytes);
    mappings_[pointer] = {slot->id, size_bytes, slot->device, true, 0};
    return pointer;
  }

  Status free(void* pointer) override {
    POLYKV_RETURN_IF_ERROR(check_context("free"));
    const std::lock_guard lock(mutex_);
    const auto found = mappings_.find(pointer);
    if (found == mappings_.end() || !found->second.is_own) {
      violation("free: not an allocation of this process");
      return {POLYKV_ERR_INVALID_ARGUMENT, "free device memory: invalid argument"};
    }
    EmulatedStateFile::Guard state(file_);
    EmulatedAllocation* allocation = find(*state, found->second.id);
    if (allocation->importer_count() > 0) violation("free: another process has it open");
    allocation->is_freed = true;
    ::munmap(pointer, found->second.size_bytes);
    mappings_.erase(found);
    sweep(*state);
    return Status::ok();
  }

  Status zero(void* pointer, uint64_t size_bytes) override {
    POLYKV_RETURN_IF_ERROR(check_range("zero", pointer, size_bytes));
    std::memset(pointer, 0, size_bytes);
    return Status::ok();
  }
  Status copy_to_device(void* target, const void* source, uint64_t size_bytes) override {
    POLYKV_RETURN_IF_ERROR(check_range("copy to the device", target, size_bytes));
    std::memcpy(target, source, size_bytes);
    return Status::ok();
  }
  Status copy_to_host(void* target, const void* source, uint64_t size_bytes) override {
    POLYKV_RETURN_IF_ERROR(check_range("copy from the device", source, size_bytes));
    std::memcpy(target, source, size_bytes);
    return Status::ok();
  }

  Result<IpcHandle> export_handle(void* pointer) override {
    POLYKV_RETURN_IF_ERROR(check_context("export"));
    const EmulatedFaults now = faults();
    if (now.has("ipc_unsupported") || now.has("private_memory")) {
      ++EmulatedStateFile::Guard(file_)->refused_export_total;
      if (now.has("private_memory"))
        return {POLYKV_ERR_INVALID_ARGUMENT, "export device memory: invalid argument"};
      return {POLYKV_ERR_UNSUPPORTED, "export device memory: operation not supported"};
    }
    const std::lock_guard lock(mutex_);
    const auto found = mappings_.find(pointer);
    if (found == mappings_.end() || !found->second.is_own)
      return {POLYKV_ERR_INVALID_ARGUMENT, "export device memory: invalid argument"};
    EmulatedStateFile::Guard state(file_);
    WireHandle handle{kMagic, found->second.id, find(*state, found->second.id)->nonce, {}};
    IpcHandle bytes;
    std::memcpy(bytes.data(), &handle, sizeof handle);
    return bytes;
  }

  Result<void*> open(const IpcHandle& bytes) override {
    POLYKV_RETURN_IF_ERROR(check_context("open"));
    if (faults().has("open_fails"))
      return {POLYKV_ERR_UNSUPPORTED, "open device memory: mapping of buffer object failed"};
    WireHandle handle;
    std::memcpy(&handle, bytes.data(), sizeof handle);
    const std::lock_guard lock(mutex_);
    EmulatedStateFile::Guard state(file_);
    sweep(*state);
    EmulatedAllocation* allocation = find(*state, handle.id);
    if (handle.magic != kMagic || allocation == nullptr || allocation->nonce != handle.nonce ||
        allocation->is_freed) {
      return {POLYKV_ERR_UNSUPPORTED, "open device memory: invalid resource handle"};
    }
    if (allocation->owner == self_)
      return {POLYKV_ERR_INVALID_ARGUMENT, "open device memory: this process exported it"};
    if (allocation->owner_uid != ::geteuid())
      return {POLYKV_ERR_PERMISSION, "open device memory: it is another user's"};
    if (static_cast<int>(allocation->device) != current_device)
      return {POLYKV_ERR_WRONG_DEVICE, "open device memory: it is on another device"};
    return import(*state, *allocation);
  }

  Status close(void* pointer) override {
    POLYKV_RETURN_IF_ERROR(check_context("close"));
    const std::lock_guard lock(mutex_);
    const auto found = mappings_.find(pointer);
    if (found == mappings_.end() || found->second.is_own || found->second.open_count == 0) {
      violation("close: it is not open");
      return {POLYKV_ERR_INVALID_ARGUMENT, "close device memory: invalid argument"};
    }
    if (static_cast<int>(found->second.device) != current_device)
      violation("close: another device is current");
    if (is_in_use(pointer, found->second)) violation("close: a stream still uses it");
    EmulatedStateFile::Guard state(file_);
    if (EmulatedAllocation* allocation = find(*state, found->second.id)) {
      EmulatedImporter* importer = importer_of(*allocation);
      if (importer != nullptr && --importer->open_count == 0) *importer = {};
    }
    if (--found->second.open_count == 0) {
      ::munmap(pointer, found->second.size_bytes);
      mappings_.erase(found);
    }
    sweep(*state);
    return Status::ok();
  }

  Result<void*> create_stream() override {
    POLYKV_RETURN_IF_ERROR(check_context("create_stream"));
    const std::lock_guard lock(mutex_);
    streams_.push_back(std::make_unique<Stream>());
    return static_cast<void*>(streams_.back().get());
  }
  Status destroy_stream(void* stream) override {
    POLYKV_RETURN_IF_ERROR(check_context("destroy_stream"));
    const std::lock_guard lock(mutex_);
    std::erase_if(streams_, [&](const auto& known) { return known.get() == stream; });
    return Status::ok();
  }
  Status synchronize_stream(void* stream) override {
    POLYKV_RETURN_IF_ERROR(check_context("synchronize_stream"));
    const std::lock_guard lock(mutex_);
    for (const auto& known : streams_) {
      if (known.get() == stream) known->in_use.clear();
    }
    return Status::ok();
  }
  // An event is waited for as all of its stream.
  Result<void*> record_event(void* stream) override {
    POLYKV_RETURN_IF_ERROR(check_context("record_event"));
    return stream;
  }
  Status synchronize_event(void* event) override { return synchronize_stream(event); }
  Status destroy_event(void* /*event*/) override { return check_context("destroy_event"); }
  Status synchronize_device() override {
    POLYKV_RETURN_IF_ERROR(check_context("synchronize_device"));
    const std::lock_guard lock(mutex_);
    for (const auto& stream : streams_) stream->in_use.clear();
    return Status::ok();
  }

  Result<bool> can_access_peer(int /*peer*/) override {
    POLYKV_RETURN_IF_ERROR(check_context("can_access_peer"));
    return !faults().has("no_peer_access");
  }
  Status enable_peer_access(int /*peer*/) override {
    POLYKV_RETURN_IF_ERROR(check_context("enable_peer_access"));
    if (faults().has("no_peer_access"))
      return {POLYKV_ERR_WRONG_DEVICE, "enable peer access: not supported between these GPUs"};
    return Status::ok();
  }

  /// A kernel that a stream has not finished. What is done outside of streams waits for the default one.
  void keep_busy(void* stream, const void* pointer) {
    const std::lock_guard lock(mutex_);
    for (const auto& known : streams_) {
      if (known.get() == stream) known->in_use.insert(pointer);
    }
  }

 private:
  EmulatedFaults faults() const { return EmulatedFaults::read(folder_); }
  std::string memory_path(uint64_t id) const { return folder_ + "/memory-" + std::to_string(id); }

  void violation(const std::string& what) const {
    const int fd = ::open((folder_ + "/violations").c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
    const std::string line = what + " (process " + std::to_string(::getpid()) + ")\n";
    if (fd < 0 || ::write(fd, line.data(), line.size()) < 0) std::abort();
    ::close(fd);
  }

  /// A context does not survive fork.
  Status check_process(const char* operation) const {
    if (::getpid() != self_.pid) {
      violation(std::string(operation) + ": used after fork");
      return {POLYKV_ERR_UNSUPPORTED, std::string(operation) + ": initialization error"};
    }
    if (faults().has("device_lost"))
      return {POLYKV_ERR_DEVICE_LOST, std::string(operation) + ": GPU has fallen off the bus"};
    return Status::ok();
  }
  Status check_context(const char* operation) const {
    POLYKV_RETURN_IF_ERROR(check_process(operation));
    if (current_device >= 0) return Status::ok();
    violation(std::string(operation) + ": no device was chosen on this thread");
    return {POLYKV_ERR_INVALID_ARGUMENT, std::string(operation) + ": invalid device context"};
  }

  Status check_range(const char* operation, const void* pointer, uint64_t size_bytes) {
    POLYKV_RETURN_IF_ERROR(check_context(operation));
    const std::lock_guard lock(mutex_);
    const auto* const first = static_cast<const uint8_t*>(pointer);
    for (const auto& [start, mapping] : mappings_) {
      const auto* const begin = static_cast<const uint8_t*>(start);
      if (first < begin || first + size_bytes > begin + mapping.size_bytes) continue;
      if (static_cast<int>(mapping.device) != current_device)
        violation(std::string(operation) + ": another device is current");
      if (is_in_use(start, mapping))
        violation(std::string(operation) + ": a stream is not done with it");
      spoil_if_exporter_died(start, mapping, operation);
      return Status::ok();
    }
    violation(std::string(operation) + ": outside of every allocation");
    return {POLYKV_ERR_INVALID_ARGUMENT, std::string(operation) + ": invalid argument"};
  }

  void spoil_if_exporter_died(void* start, const Mapping& mapping, const char* operation) {
    if (mapping.is_own) return;
    EmulatedStateFile::Guard state(file_);
    const EmulatedAllocation* allocation = find(*state, mapping.id);
    if (allocation != nullptr && !allocation->is_freed && allocation->owner.is_alive()) return;
    violation(std::string(operation) + ": its exporter is gone");
    std::memset(start, kGarbage, mapping.size_bytes);
  }

  bool is_in_use(const void* start, const Mapping& mapping) const {
    const auto* const end = static_cast<const uint8_t*>(start) + mapping.size_bytes;
    return std::any_of(streams_.begin(), streams_.end(), [&](const auto& stream) {
      const auto first = stream->in_use.lower_bound(start);
      return first != stream->in_use.end() && *first < end;
    });
  }

  static void* map(int fd, uint64_t size_bytes) {
    void* pointer = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (pointer == MAP_FAILED) std::abort();
    return pointer;
  }

  static EmulatedAllocation* find(EmulatedState& state, uint64_t id) {
    for (EmulatedAllocation& allocation : state.allocations) {
      if (allocation.id == id && id != 0) return &allocation;
    }
    return nullptr;
  }
  EmulatedImporter* importer_of(EmulatedAllocation& allocation) const {
    for (EmulatedImporter& importer : allocation.importers) {
      if (importer.open_count > 0 && importer.process == self_) return &importer;
    }
    return nullptr;
  }

  Result<void*> import(EmulatedState& state, EmulatedAllocation& allocation) {
    ++state.open_total;
    if (EmulatedImporter* importer = importer_of(allocation)) {
      ++importer->open_count;
      for (auto& [pointer, mapping] : mappings_) {
        if (mapping.id != allocation.id) continue;
        ++mapping.open_count;
        return pointer;
      }
    }
    for (EmulatedImporter& importer : allocation.importers) {
      if (importer.open_count > 0 && importer.process.is_alive()) continue;
      const int fd = ::open(memory_path(allocation.id).c_str(), O_RDWR | O_CLOEXEC);
      if (fd < 0) return {POLYKV_ERR_PERMISSION, "open device memory: not allowed"};
      importer = {self_, 1};
      void* pointer = map(fd, allocation.size_bytes);
      mappings_[pointer] = {allocation.id, allocation.size_bytes, allocation.device, false, 1};
      return pointer;
    }
    return {POLYKV_ERR_UNSUPPORTED, "open device memory: too many processes for the emulation"};
  }

  /// Memory goes when its owner has freed it, or is gone, and nobody has it open.
  void sweep(EmulatedState& state) const {
    for (EmulatedAllocation& allocation : state.allocations) {
      if (allocation.id == 0) continue;
      if (!allocation.owner.is_alive()) allocation.is_freed = true;
      if (!allocation.is_freed || allocation.importer_count() > 0) continue;
      ::unlink(memory_path(allocation.id).c_str());
      allocation = EmulatedAllocation{};
    }
  }
  static uint64_t free_bytes(const EmulatedState& state) {
    uint64_t used = current_device == 0 ? state.foreign_bytes : 0;
    for (const EmulatedAllocation& allocation : state.allocations) {
      if (allocation.id != 0 && static_cast<int>(allocation.device) == current_device)
        used += allocation.size_bytes;
    }
    return state.device_bytes - std::min(state.device_bytes, used);
  }

  std::string folder_;
  EmulatedStateFile file_;
  EmulatedProcess self_;
  std::mutex mutex_;  // guards what follows; taken before the file's lock
  std::map<void*, Mapping> mappings_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

EmulatedRuntime* the_runtime() {
  static const char* folder = std::getenv(kEmulationFolder);
  static EmulatedRuntime* runtime = folder == nullptr ? nullptr : new EmulatedRuntime(folder);
  return runtime;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) device::Runtime* polykv_device_runtime(
    uint32_t version) try {
  return version == device::kRuntimeVersion ? the_runtime() : nullptr;
} catch (const std::exception&) {
  return nullptr;  // there is no such folder
}

/// A stream has work on what a device pointer points to, until it is waited for.
extern "C" __attribute__((visibility("default"))) void polykv_emulated_keep_busy(
    void* stream, const void* pointer) {
  the_runtime()->keep_busy(stream, pointer);
}

}  // namespace polykv::test
