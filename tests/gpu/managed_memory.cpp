// Puts what a test allocates where GPU and CPU both reach it, so that the conformance tests of the emulation run on a
// device as they are: operator new takes from one managed allocation. Without a device the program says so and exits
// with 77.
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

namespace {

constexpr size_t kArenaBytes = size_t{2} << 30;
constexpr size_t kLeastClass = 8;  // 256 bytes, what kernels ask workspaces to be aligned to

/// Blocks of powers of two; what is given back is used again for its size. Tests are small.
class Arena {
 public:
  Arena() {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      std::printf("unavailable: no GPU that CUDA can use: %s\n",
                  error == cudaSuccess ? "none found" : cudaGetErrorString(error));
      std::fflush(stdout);
      std::_Exit(77);
    }
    void* memory = nullptr;
    if (cudaMallocManaged(&memory, kArenaBytes) != cudaSuccess) {
      std::printf("no managed memory: %s\n", cudaGetErrorString(cudaGetLastError()));
      std::_Exit(1);
    }
    begin_ = static_cast<uint8_t*>(memory);
  }

  void* allocate(size_t size_bytes, size_t alignment) {
    size_t size_class = kLeastClass;
    while ((size_t{1} << size_class) < size_bytes || (size_t{1} << size_class) < alignment)
      ++size_class;
    const std::lock_guard lock(mutex_);
    if (Free* block = free_[size_class]) {
      free_[size_class] = block->next;
      return block;
    }
    const size_t bytes = size_t{1} << size_class;
    const size_t at = (used_ + alignment - 1) / alignment * alignment;
    if (bytes > kArenaBytes || at > kArenaBytes - bytes) return nullptr;
    used_ = at + bytes;
    classes_[at >> kLeastClass] = static_cast<uint8_t>(size_class);
    return begin_ + at;
  }
  void release(void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto at = static_cast<size_t>(static_cast<uint8_t*>(pointer) - begin_);
    const size_t size_class = classes_[at >> kLeastClass];
    free_[size_class] = new (pointer) Free{free_[size_class]};
  }

 private:
  struct Free {
    Free* next;
  };
  uint8_t* begin_ = nullptr;
  std::mutex mutex_;  // guards what follows
  size_t used_ = 0;
  std::array<Free*, 64> free_{};
  std::array<uint8_t, (kArenaBytes >> kLeastClass)> classes_{};
};

// The CUDA runtime allocates while the arena is being made.
thread_local bool is_making_arena = false;

Arena* arena() {
  if (is_making_arena) return nullptr;
  static Arena* const made = [] {
    is_making_arena = true;
    // Not by new, which is below.
    void* memory = std::calloc(1, sizeof(Arena));
    auto* const result = memory == nullptr ? nullptr : new (memory) Arena;
    is_making_arena = false;
    return result;
  }();
  return made;
}

/// In front of every block: whose it is.
struct Header {
  Arena* owner;  // null: malloc's
  void* start;
};

void* allocate(size_t size_bytes, size_t alignment) {
  if (alignment < 256) alignment = 256;
  Arena* const from = arena();
  const size_t total = size_bytes + alignment;
  auto* const start = static_cast<uint8_t*>(
      from != nullptr
          ? from->allocate(total, alignment)
          : std::aligned_alloc(alignment, (total + alignment - 1) / alignment * alignment));
  if (start == nullptr) throw std::bad_alloc();
  new (start + alignment - sizeof(Header)) Header{from, start};
  return start + alignment;
}

void release(void* pointer) {
  if (pointer == nullptr) return;
  const Header header = *(static_cast<Header*>(pointer) - 1);
  header.owner != nullptr ? header.owner->release(header.start) : std::free(header.start);
}

}  // namespace

void* operator new(size_t size_bytes) {
  return allocate(size_bytes, alignof(std::max_align_t));
}
void* operator new[](size_t size_bytes) {
  return allocate(size_bytes, alignof(std::max_align_t));
}
void* operator new(size_t size_bytes, std::align_val_t alignment) {
  return allocate(size_bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t size_bytes, std::align_val_t alignment) {
  return allocate(size_bytes, static_cast<size_t>(alignment));
}
void operator delete(void* pointer) noexcept {
  release(pointer);
}
void operator delete[](void* pointer) noexcept {
  release(pointer);
}
void operator delete(void* pointer, size_t) noexcept {
  release(pointer);
}
void operator delete[](void* pointer, size_t) noexcept {
  release(pointer);
}
void operator delete(void* pointer, std::align_val_t) noexcept {
  release(pointer);
}
void operator delete[](void* pointer, std::align_val_t) noexcept {
  release(pointer);
}
void operator delete(void* pointer, size_t, std::align_val_t) noexcept {
  release(pointer);
}
void operator delete[](void* pointer, size_t, std::align_val_t) noexcept {
  release(pointer);
}
