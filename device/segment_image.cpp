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
  const int protection = access == MapAccess::read_write ? PROT_READ | PROT_WRITE : PROT_READ;
  void* range =
      ::mmap(nullptr, total_bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED)
    return system_error("map a segment", errno, "see vm.max_map_count and RLIMIT_AS");
  SegmentImage image;
  image.data_ = static_cast<uint8_t*>(range);
  image.metadata_bytes_ = metadata_bytes;
  image.total_bytes_ = total_bytes;
  image.access_ = access;
  if (::mmap(range, metadata_bytes, protection, MAP_SHARED | MAP_FIXED, metadata_fd, 0) ==
      MAP_FAILED) {
    return system_error("map a segment's metadata", errno, "see vm.max_map_count");
  }
  return image;
}

SegmentImage::SegmentImage(SegmentImage&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      metadata_bytes_(other.metadata_bytes_),
      total_bytes_(std::exchange(other.total_bytes_, 0)),
      access_(other.access_) {}

SegmentImage& SegmentImage::operator=(SegmentImage&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(metadata_bytes_, other.metadata_bytes_);
  std::swap(total_bytes_, other.total_bytes_);
  std::swap(access_, other.access_);
  return *this;
}

SegmentImage::~SegmentImage() {
  if (data_ != nullptr) ::munmap(data_, total_bytes_);
}

/// The pages that a range of the payload is in.
Status SegmentImage::make_writable(uint64_t offset, uint64_t size_bytes) const {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t first = offset / page * page;
  if (size_bytes == 0 || access_ == MapAccess::read_write ||
      ::mprotect(data_ + first, offset + size_bytes - first, PROT_READ | PROT_WRITE) == 0) {
    return Status::ok();
  }
  return system_error("take memory for a segment's payload", errno,
                      "free memory, or see vm.max_map_count and RLIMIT_DATA");
}

Status SegmentImage::fetch(Runtime& runtime, const void* device, uint64_t offset,
                           uint64_t size_bytes) const {
  assert(offset >= metadata_bytes_ && offset <= total_bytes_ &&
         size_bytes <= total_bytes_ - offset);
  POLYKV_RETURN_IF_ERROR(make_writable(offset, size_bytes));
  return runtime.copy_to_host(
      data_ + offset, static_cast<const uint8_t*>(device) + (offset - metadata_bytes_), size_bytes);
}

void SegmentImage::discard(uint64_t offset, uint64_t size_bytes) const {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t first = (offset + page - 1) / page * page;
  const uint64_t last = (offset + size_bytes) / page * page;
  if (first < last) ::madvise(data_ + first, last - first, MADV_DONTNEED);
}

}  // namespace polykv::device
