// How fast this machine's memory is: the yardstick of every other figure. Buffers have to be larger
// than the caches; each thread has a part of its own.
#pragma once

#include <cstdint>
#include <functional>

namespace polykv::bench {

class Memory {
 public:
  Memory(uint32_t thread_count, size_t size_bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  /// One pass each; bytes per second. the others count the bytes written.
  double read() const { return read_with(streams_); }
  double copy() const;   // memcpy
  double fill() const;   // non-temporal stores
  double widen() const;  // reads a byte for each two that it writes past the caches
  /// Streams that a thread reads at once: what was fastest when this was made.
  uint32_t streams() const { return streams_; }
  uint32_t thread_count() const { return thread_count_; }

 private:
  double read_with(uint32_t streams) const;
  double write(const std::function<void(size_t first, size_t bytes)>& part) const;
  uint8_t* part(uint8_t* buffer, uint32_t thread) const {
    return buffer + size_bytes_ / thread_count_ * thread;
  }

  uint32_t thread_count_;
  size_t size_bytes_;
  uint32_t streams_ = 1;
  uint8_t* source_;
  uint8_t* target_;
};

}  // namespace polykv::bench
