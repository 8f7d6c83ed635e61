// The payload of a leased segment where it is in device memory. What reads segments in host memory
// reads a copy of each layer that is made when it is first asked for; what reads on the GPU gets the
// device memory itself.
#pragma once

#include <mutex>
#include <optional>
#include <vector>

#include "device/segment_image.h"
#include "kernels/segment.h"
#include "libclient/cuda/opened_memory.h"
#include "libclient/session.h"

namespace polykv::lib {

/// Thread-safe.
class DeviceSegment {
 public:
  /// `image` holds the metadata and has room for the payload. memory.size_bytes was checked.
  DeviceSegment(std::shared_ptr<Session> session, device::SegmentImage image, RemoteMemory memory,
                uint64_t data_offset, size_t layer_count)
      : session_(std::move(session)),
        image_(std::move(image)),
        memory_(memory),
        data_offset_(data_offset),
        is_fetched_(layer_count) {}

  std::span<const uint8_t> bytes() const { return image_.bytes(); }

  /// Until it returns POLYKV_OK the layer's payload in bytes() is not there; afterwards it stays.
  /// POLYKV_ERR_DAEMON_GONE: what device memory of a dead exporter holds is undefined.
  Status fetch_layer(uint32_t layer, const LayerRecord& record);
  /// The checksums of all payloads, of the bytes that are in device memory now. `view`: of bytes().
  /// POLYKV_ERR_CORRUPT names the first layer whose bytes are others.
  Status verify(const SegmentView& view);
  /// The device memory, opened by the first call: its first byte is the segment's at data_offset.
  /// Valid as long as this, and as the daemon lives.
  struct View {
    const void* data = nullptr;
    Gpu gpu;
  };
  Result<View> open();
  uint64_t data_offset() const { return data_offset_; }

 private:
  Status open_locked();

  std::shared_ptr<Session> session_;
  device::SegmentImage image_;
  RemoteMemory memory_;
  uint64_t data_offset_;

  std::mutex mutex_;  // guards what follows, and the payload of layers that are not there yet
  std::vector<bool> is_fetched_;
  std::optional<OpenedMemory> opened_;
};

}  // namespace polykv::lib
