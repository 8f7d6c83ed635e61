#include <cstdlib>
#include <cstring>
#include <new>

#include "tests/cuda_emulation/device_calls.h"
#include "tests/cuda_emulation/emulated_calls.h"

namespace polykv::test {

namespace {

class Memory {
 public:
  explicit Memory(uint64_t size_bytes) : size_bytes_(size_bytes) {
    if (posix_memalign(&data_, 256, size_bytes) != 0) throw std::bad_alloc();
    std::memset(data_, 0xff, size_bytes);
  }
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }
  void upload(const void* host, uint64_t size_bytes) { std::memcpy(data_, host, size_bytes); }
  void download(void* host, uint64_t size_bytes) const { std::memcpy(host, data_, size_bytes); }

 private:
  void* data_ = nullptr;
  uint64_t size_bytes_;
};

}  // namespace

}  // namespace polykv::test

#include "tests/cuda_emulation/device_calls.inl"
