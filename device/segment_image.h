// A segment whose payload is in device memory, as one range of addresses of this process: the sealed
// memfd with its metadata (header, layer table, token ids, digests, certificate) is mapped at the
// start, and behind it is private memory, empty until layers' payloads are copied into it. So
// everything that reads segments in host memory reads this as well. A reader's payloads become writable when they are
// copied and not before: RLIMIT_DATA counts writable private memory, used or not, and whoever reads on the GPU copies none.
#pragma once

#include <cstdint>
#include <span>

#include "common/mapping.h"
#include "common/result.h"
#include "device/runtime.h"

namespace polykv::device {

/// Move-only owner of the range. What is copied into it is the caller's to order among threads.
class SegmentImage {
 public:
  SegmentImage() = default;
  /// metadata_bytes: a multiple of the page size, at most total_bytes; the file has as many.
  /// read_write is for producers, whose file is not sealed yet.
  static Result<SegmentImage> map(int metadata_fd, uint64_t metadata_bytes, uint64_t total_bytes,
                                  MapAccess access = MapAccess::read_only);
  SegmentImage(SegmentImage&& other) noexcept;
  SegmentImage& operator=(SegmentImage&& other) noexcept;
  ~SegmentImage();

  std::span<const uint8_t> bytes() const { return {data_, total_bytes_}; }
  /// Only of a read_write image.
  std::span<uint8_t> writable_bytes() const { return {data_, total_bytes_}; }
  /// Copies a range of the segment from device memory whose first byte is the first behind the
  /// metadata. The runtime's device is current.
  Status fetch(Runtime& runtime, const void* device, uint64_t offset, uint64_t size_bytes) const;
  /// Gives a range's memory back; reads as zeros then.
  void discard(uint64_t offset, uint64_t size_bytes) const;
  /// As Mapping's.
  void forget() noexcept { data_ = nullptr; }

 private:
  Status make_writable(uint64_t offset, uint64_t size_bytes) const;

  uint8_t* data_ = nullptr;
  uint64_t metadata_bytes_ = 0;
  uint64_t total_bytes_ = 0;
  MapAccess access_ = MapAccess::read_only;
};

}  // namespace polykv::device
