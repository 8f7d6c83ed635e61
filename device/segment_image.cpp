#include "device/segment_image.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cassert>
#include <cerrno>
#include <utility>

namespace polykv::device {

Result<SegmentImage> SegmentImage::map(int metadata_fd, uint64_t metadata_bytes,
                                       uint64_t total_bytes, MapAccess access) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  if (metadata_bytes == 0 || metadata_bytes % page != 0 || metadata_bytes > total_bytes) {
    return {POLYKV_ERR_CORRUPT,
            format("map a segment's metadata: %llu of %llu bytes are not whole pages of it",
                   static_cast<unsigned long long>(metadata_bytes),
                   static_cast<unsigned long long>(total_bytes))};
  }
  // Addresses alone: memory comes with what is copied into them.
  void* range = ::mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED)
    return system_error("map a segment", errno, "see vm.max_map_count and RLIMIT_AS");
  SegmentImage image;
  image.data_ = static_cast<uint8_t*>(range);
  image.metadata_bytes_ = metadata_bytes;
  image.total_bytes_ = total_bytes;
  const int protection = access == MapAccess::read_write ? PROT_READ | PROT_WRITE : PROT_READ;
  if (::mmap(range, metadata_bytes, protection, MAP_SHARED | MAP_FIXED, metadata_fd, 0) ==
      MAP_FAILED) {
    return system_error("map a segment's metadata", errno, "see vm.max_map_count");
  }
  return image;
}

SegmentImage::SegmentImage(SegmentImage&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      metadata_bytes_(other.metadata_bytes_),
      total_bytes_(std::exchange(other.total_bytes_, 0)) {}

SegmentImage& SegmentImage::operator=(SegmentImage&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(metadata_bytes_, other.metadata_bytes_);
  std::swap(total_bytes_, other.total_bytes_);
  return *this;
}

SegmentImage::~SegmentImage() {
  if (data_ != nullptr) ::munmap(data_, total_bytes_);
}

std::span<uint8_t> SegmentImage::payload(uint64_t offset, uint64_t size_bytes) const {
  assert(offset >= metadata_bytes_ && offset <= total_bytes_ &&
         size_bytes <= total_bytes_ - offset);
  return {data_ + offset, size_bytes};
}

Status SegmentImage::fetch(Runtime& runtime, const void* device, uint64_t offset,
                           uint64_t size_bytes) const {
  const std::span<uint8_t> target = payload(offset, size_bytes);
  return runtime.copy_to_host(
      target.data(), static_cast<const uint8_t*>(device) + (offset - metadata_bytes_), size_bytes);
}

void SegmentImage::discard(uint64_t offset, uint64_t size_bytes) const {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t first = (offset + page - 1) / page * page;
  const uint64_t last = (offset + size_bytes) / page * page;
  if (first < last) ::madvise(data_ + first, last - first, MADV_DONTNEED);
}

}  // namespace polykv::device
