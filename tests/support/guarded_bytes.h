// Bytes behind which nothing can be read or written: a program that does is killed, with or without
// the address sanitizer.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <span>

namespace polykv::test {

class GuardedBytes {
 public:
  explicit GuardedBytes(size_t size_bytes)
      : size_bytes_(size_bytes),
        page_bytes_(static_cast<size_t>(::sysconf(_SC_PAGESIZE))),
        mapped_bytes_((size_bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_ + page_bytes_) {
    void* memory =
        ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<uint8_t*>(memory);
    if (::mprotect(end(), page_bytes_, PROT_NONE) != 0) throw std::bad_alloc();
  }
  ~GuardedBytes() { ::munmap(memory_, mapped_bytes_); }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;

  std::span<uint8_t> span() const { return {end() - size_bytes_, size_bytes_}; }

 private:
  uint8_t* end() const { return memory_ + mapped_bytes_ - page_bytes_; }

  size_t size_bytes_;
  size_t page_bytes_;
  size_t mapped_bytes_;
  uint8_t* memory_ = nullptr;
};

}  // namespace polykv::test
