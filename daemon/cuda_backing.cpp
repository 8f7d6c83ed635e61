#include "daemon/cuda_backing.h"

#include <unistd.h>

#include <mutex>

#include "common/mapping.h"
#include "common/memfd.h"
#include "daemon/log.h"

namespace polykv::daemon {

namespace {
/// A device that is lost is noticed within this, also when nobody asks for anything.
constexpr int64_t kLookIntervalMs = 1'000;
// A driver that is unloaded, or a device that fell off, is not always told as lost.
constexpr uint32_t kLooksUntilLost = 5;
}  // namespace

struct CudaBacking::Thread {
  explicit Thread(EventLoop& loop) : pool(std::make_unique<ThreadPool>(loop, 1)) {}
  std::mutex mutex;
  std::unique_ptr<ThreadPool> pool;  // guarded; null once the backing is gone
};

CudaBacking::CudaBacking(EventLoop& loop, ThreadPool& pool, const MemoryProbe& memory,
                         Settings settings, std::function<void(const Status&)> on_lost)
    : loop_(loop),
      pool_(pool),
      memory_(memory),
      settings_(std::move(settings)),
      on_lost_(std::move(on_lost)),
      thread_(std::make_shared<Thread>(loop)) {
  facts_.name = "cuda";
  facts_.device = settings_.device.info;
  facts_.versions = settings_.device.versions;
  facts_.reserve_bytes = settings_.device_reserve_bytes;
  look_again();
}

CudaBacking::~CudaBacking() {
  // Not joined under the lock: a job that is running may want it.
  std::unique_ptr<ThreadPool> ending;
  {
    const std::lock_guard lock(thread_->mutex);
    ending = std::move(thread_->pool);
  }
}

Status CudaBacking::check_user(uid_t uid, bool is_public) const {
  if (uid != ::geteuid()) {
    return {POLYKV_ERR_PERMISSION,
            format("use this polykvd: its documents are in GPU memory, which the driver shares "
                   "within one user, and it runs as user id %u and not %u; use a polykvd of your "
                   "own, or one that keeps documents in host memory (--backing memfd)",
                   ::geteuid(), uid)};
  }
  if (is_public) {
    return {POLYKV_ERR_UNSUPPORTED,
            "share a document with every user: this polykvd keeps documents in GPU memory, which "
            "the driver shares within one user; ask a polykvd that keeps them in host memory "
            "(--backing memfd)"};
  }
  return Status::ok();
}

uint64_t CudaBacking::charged_bytes(const SegmentPromise& promise) const {
  return device::round_up(promise.size_bytes - promise.data_offset);
}

std::string CudaBacking::memory_name() const {
  return "device memory of " + facts_.device.name + " (" + device::uuid_text(facts_.device.uuid) +
         ")";
}

// ---- the device's thread -----------------------------------------------------------------------

template <typename T>
void CudaBacking::on_device(std::function<Result<T>()> work, Done<T> done) {
  const std::lock_guard lock(thread_->mutex);
  thread_->pool->submit<Result<T>>(
      [this, work = std::move(work)]() -> Result<T> {
        POLYKV_RETURN_IF_ERROR(
            settings_.device.runtime->use_device(settings_.device.index).with_context("GPU"));
        return work();
      },
      [this, done = std::move(done)](Result<T> result) {
        if (result.status().code() == POLYKV_ERR_DEVICE_LOST) lose(result.status());
        done(std::move(result));
      });
}

void CudaBacking::look_again() {
  on_device<device::MemoryInfo>(
      [this] { return settings_.device.runtime->memory(); },
      [this](const Result<device::MemoryInfo>& memory) {
        if (memory) facts_.free_bytes = memory->free_bytes;
        failed_looks_ = memory ? 0 : failed_looks_ + 1;
        if (failed_looks_ == kLooksUntilLost) {
          lose({POLYKV_ERR_DEVICE_LOST, "the GPU does not answer: " + memory.status().message()});
        }
        if (!is_lost_) loop_.add_timer(kLookIntervalMs, [this] { look_again(); });
      });
}

void CudaBacking::lose(const Status& why) {
  if (is_lost_) return;
  is_lost_ = true;
  on_lost_(why);
}

// ---- segments ----------------------------------------------------------------------------------

/// Host memory is taken as well, until the segment was copied; no eviction gives any of it back.
Status CudaBacking::check_host_memory(const SegmentPromise& promise) const {
  const uint64_t needed_bytes = host_bytes(promise);
  const uint64_t taken_bytes = host_unallocated_bytes_ + settings_.host_reserve_bytes;
  POLYKV_ASSIGN_OR_RETURN(const std::vector<MemoryHeadroom> headrooms, memory_.measure());
  for (const MemoryHeadroom& headroom : headrooms) {
    const uint64_t free_bytes = headroom.free_bytes - std::min(headroom.free_bytes, taken_bytes);
    if (free_bytes >= needed_bytes) continue;
    return {POLYKV_ERR_BUDGET,
            format("reserve memory: %llu bytes of host memory needed until the segment is on the "
                   "GPU, %llu free of %s; %s",
                   static_cast<unsigned long long>(needed_bytes),
                   static_cast<unsigned long long>(free_bytes), headroom.name.c_str(),
                   headroom.remedy.c_str())};
  }
  return Status::ok();
}

void CudaBacking::measure(const SegmentPromise& promise, Done<std::vector<MemoryHeadroom>> done) {
  if (const Status host = check_host_memory(promise); !host.is_ok()) return done(host);
  on_device<device::MemoryInfo>(
      [this] { return settings_.device.runtime->memory(); },
      [this, done = std::move(done)](const Result<device::MemoryInfo>& memory) {
        if (!memory) return done(memory.status());
        facts_.free_bytes = memory->free_bytes;
        done(std::vector<MemoryHeadroom>{
            {memory_name(), memory->free_bytes,
             "end programs that use it, remove documents (polykvctl rm), or lower cuda.reserve"}});
      });
}

/// On the device's thread. What is there now is asked anew: a program that is not ours may have taken
/// it, and must not be made to fail by us.
Result<SharedDeviceMemory> CudaBacking::allocate_device(uint64_t size_bytes) const {
  device::Runtime& runtime = *settings_.device.runtime;
  POLYKV_ASSIGN_OR_RETURN(const device::MemoryInfo memory, runtime.memory());
  const auto short_of = [&](uint64_t free_bytes) {
    return Status(POLYKV_ERR_BUDGET,
                  format("reserve memory: %llu bytes needed, %llu free of %s beyond the %llu that "
                         "are left to others; end programs that use it, or lower cuda.reserve",
                         static_cast<unsigned long long>(size_bytes),
                         static_cast<unsigned long long>(free_bytes), memory_name().c_str(),
                         static_cast<unsigned long long>(settings_.device_reserve_bytes)));
  };
  const uint64_t reserve = std::min(memory.free_bytes, settings_.device_reserve_bytes);
  if (memory.free_bytes - reserve < size_bytes) return short_of(memory.free_bytes - reserve);
  const Result<void*> pointer = runtime.allocate(size_bytes);
  // It may be free and yet in no piece that is large enough.
  if (pointer.status().code() == POLYKV_ERR_NO_MEMORY) return short_of(0);
  if (!pointer) return pointer.status();
  const auto free_it = [gate = thread_, device = settings_.device](const DeviceMemory* owned) {
    const std::unique_ptr<const DeviceMemory> memory_of(owned);
    const std::lock_guard lock(gate->mutex);
    if (!gate->pool) return;
    gate->pool->submit<Status>(
        [device, pointer = owned->pointer] {
          POLYKV_RETURN_IF_ERROR(device.runtime->use_device(device.index));
          return device.runtime->free(pointer);
        },
        [](const Status& freed) {
          if (!freed.is_ok()) log_error("a segment's memory: %s", freed.message().c_str());
        });
  };
  auto made = std::make_unique<DeviceMemory>();
  made->pointer = *pointer;
  made->size_bytes = size_bytes;
  made->device_uuid = facts_.device.uuid;
  const std::shared_ptr<DeviceMemory> owned(made.release(), free_it);
  POLYKV_RETURN_IF_ERROR(runtime.zero(owned->pointer, size_bytes));
  POLYKV_ASSIGN_OR_RETURN(owned->handle, runtime.export_handle(owned->pointer));
  return SharedDeviceMemory(owned);
}

void CudaBacking::allocate(SharedPromise promise, Done<SegmentMemory> done) {
  // Others may have been let in since it was measured.
  if (const Status host = check_host_memory(*promise); !host.is_ok()) return done(host);
  host_unallocated_bytes_ += host_bytes(*promise);
  pool_.submit<Result<UniqueFd>>(
      [size_bytes = host_bytes(*promise)] { return allocate_segment(size_bytes); },
      [this, promise, done = std::move(done)](Result<UniqueFd> memfd) {
        host_unallocated_bytes_ -= host_bytes(*promise);
        if (!memfd) return done(memfd.status());
        const auto writable = std::make_shared<const UniqueFd>(std::move(*memfd));
        on_device<SegmentMemory>(
            [this, writable, size_bytes = charged_bytes(*promise)]() -> Result<SegmentMemory> {
              POLYKV_ASSIGN_OR_RETURN(SharedDeviceMemory device, allocate_device(size_bytes));
              return SegmentMemory{writable, std::move(device)};
            },
            done);
      });
}

Result<SealedSegment> CudaBacking::move_in(SealedSegment sealed, const DeviceMemory& memory,
                                           const SegmentPromise& promise) const {
  POLYKV_ASSIGN_OR_RETURN(
      const Mapping mapping,
      Mapping::map(sealed.readable.get(), promise.size_bytes, MapAccess::read_only));
  const std::span<const uint8_t> payload = mapping.bytes().subspan(promise.data_offset);
  POLYKV_RETURN_IF_ERROR(
      settings_.device.runtime->copy_to_device(memory.pointer, payload.data(), payload.size()));
  POLYKV_ASSIGN_OR_RETURN(const UniqueFd metadata, allocate_segment(promise.data_offset));
  {
    POLYKV_ASSIGN_OR_RETURN(const Mapping target, Mapping::map(metadata.get(), promise.data_offset,
                                                               MapAccess::read_write));
    std::copy_n(mapping.bytes().begin(), promise.data_offset, target.writable_bytes().begin());
  }
  POLYKV_ASSIGN_OR_RETURN(sealed.readable, seal_memfd(metadata.get(), promise.data_offset));
  return sealed;
}

void CudaBacking::seal(SegmentMemory memory, SharedPromise promise, Done<SealedSegment> done) {
  if (promise->into_device) {
    const auto verify = [this, memory = std::move(memory), promise]() -> Result<SealedSegment> {
      POLYKV_ASSIGN_OR_RETURN(UniqueFd readable,
                              seal_memfd(memory.writable->get(), promise->data_offset));
      POLYKV_ASSIGN_OR_RETURN(
          const device::SegmentImage image,
          device::SegmentImage::map(readable.get(), promise->data_offset, promise->size_bytes));
      const auto fetch = [&](uint64_t offset, uint64_t size_bytes) {
        return image.fetch(*settings_.device.runtime, memory.device->pointer, offset, size_bytes);
      };
      const auto discard = [&](uint64_t offset, uint64_t size_bytes) {
        image.discard(offset, size_bytes);
      };
      return verify_segment(image.bytes(), std::move(readable), *promise, {fetch, discard});
    };
    return on_device<SealedSegment>(verify, std::move(done));
  }
  pool_.submit<Result<SealedSegment>>(
      [memory, promise] { return seal_and_verify(memory.writable->get(), *promise); },
      [this, memory, promise, done = std::move(done)](Result<SealedSegment> sealed) {
        if (!sealed) return done(sealed.status());
        const auto shared = std::make_shared<SealedSegment>(std::move(*sealed));
        on_device<SealedSegment>(
            [this, memory, promise, shared] {
              return move_in(std::move(*shared), *memory.device, *promise);
            },
            done);
      });
}

}  // namespace polykv::daemon
