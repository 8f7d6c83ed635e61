#include "tests/bench/polykv_bench/bandwidth.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <new>

#include "tests/bench/polykv_bench/measure.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace polykv::bench {

namespace {

using Words = uint64_t __attribute__((vector_size(16)));
constexpr size_t kLineBytes = 64;
constexpr size_t kPrefetchBytes = 4096;  // ahead

// Where the sums go, so that reading is not optimised away.
std::atomic<uint64_t> sink;

uint8_t* allocate(size_t size_bytes) {
  void* memory =
      ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  std::memset(memory, 1, size_bytes);
  return static_cast<uint8_t*>(memory);
}

/// `Streams` equal parts side by side, a cache line of each in turn.
template <uint32_t Streams>
void read_part(const uint8_t* bytes, size_t size_bytes) {
  const size_t stream_bytes = size_bytes / Streams;
  Words sums[Streams] = {};
  for (size_t at = 0; at < stream_bytes; at += kLineBytes) {
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Streams; ++i) {
      const uint8_t* line = bytes + i * stream_bytes + at;
      __builtin_prefetch(line + kPrefetchBytes);
      for (size_t word = 0; word < kLineBytes; word += sizeof(Words)) {
        Words words;
        std::memcpy(&words, line + word, sizeof words);
        sums[i] += words;
      }
    }
  }
  for (const Words& sum : sums) sink.fetch_add(sum[0] + sum[1], std::memory_order_relaxed);
}

void fill_part(uint8_t* bytes, size_t size_bytes) {
#if defined(__x86_64__)
  const __m128i words = _mm_set1_epi8(3);
  for (size_t at = 0; at < size_bytes; at += sizeof words) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(bytes + at), words);
  }
  _mm_sfence();
#else
  std::memset(bytes, 3, size_bytes);
#endif
}

/// Bytes to two bytes each: what decoding 8 bit to 16 bit asks of the memory, without its arithmetic.
void widen_part(const uint8_t* source, uint8_t* target, size_t target_bytes) {
#if defined(__x86_64__)
  const __m128i zero = _mm_setzero_si128();
  for (size_t at = 0; at < target_bytes; at += kLineBytes) {
    __builtin_prefetch(source + at / 2 + kPrefetchBytes);
    for (size_t word = 0; word < kLineBytes; word += 2 * sizeof zero) {
      const __m128i bytes =
          _mm_load_si128(reinterpret_cast<const __m128i*>(source + (at + word) / 2));
      auto* to = reinterpret_cast<__m128i*>(target + at + word);
      _mm_stream_si128(to, _mm_unpacklo_epi8(bytes, zero));
      _mm_stream_si128(to + 1, _mm_unpackhi_epi8(bytes, zero));
    }
  }
  _mm_sfence();
#else
  for (size_t at = 0; at < target_bytes; ++at) target[at] = at % 2 == 0 ? source[at / 2] : 0;
#endif
}

}  // namespace

Memory::Memory(uint32_t thread_count, size_t size_bytes)
    : thread_count_(thread_count),
      size_bytes_(size_bytes),
      source_(allocate(size_bytes)),
      target_(allocate(size_bytes)) {
  double best = 0;
  for (const uint32_t streams : {1U, 2U, 4U, 8U}) {
    for (int i = 0; i < 3; ++i) {
      const double rate = read_with(streams);
      if (rate <= best) continue;
      best = rate;
      streams_ = streams;
    }
  }
}

Memory::~Memory() {
  ::munmap(source_, size_bytes_);
  ::munmap(target_, size_bytes_);
}

double Memory::read_with(uint32_t streams) const {
  const auto read = streams == 1   ? read_part<1>
                    : streams == 2 ? read_part<2>
                    : streams == 4 ? read_part<4>
                                   : read_part<8>;
  const size_t bytes = size_bytes_ / thread_count_ / (8 * kLineBytes) * (8 * kLineBytes);
  const double seconds = seconds_of(thread_count_, [&] {
    on_threads(thread_count_, [&](uint32_t thread) { read(part(source_, thread), bytes); });
  });
  return static_cast<double>(bytes * thread_count_) / seconds;
}

double Memory::copy() const {
  return write(
      [&](size_t first, size_t bytes) { std::memcpy(target_ + first, source_ + first, bytes); });
}

double Memory::fill() const {
  return write([&](size_t first, size_t bytes) { fill_part(target_ + first, bytes); });
}

double Memory::widen() const {
  return write(
      [&](size_t first, size_t bytes) { widen_part(source_ + first / 2, target_ + first, bytes); });
}

double Memory::write(const std::function<void(size_t first, size_t bytes)>& part) const {
  const size_t bytes = size_bytes_ / thread_count_ / kLineBytes * kLineBytes;
  const double seconds = seconds_of(thread_count_, [&] {
    on_threads(thread_count_, [&](uint32_t thread) { part(bytes * thread, bytes); });
  });
  return static_cast<double>(bytes * thread_count_) / seconds;
}

}  // namespace polykv::bench
