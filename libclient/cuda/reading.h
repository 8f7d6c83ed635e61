// Reading a lease on a GPU: where its layers are in device memory. What calls kernels stands on this:
// views tell the bytes, the caller's stream orders the work.
#pragma once

#include <cstdint>
#include <span>

#include "libclient/lease.h"

namespace polykv::lib {

/// A segment's payload part (from data_offset on) in device memory.
struct DeviceView {
  const uint8_t* data = nullptr;
  uint64_t data_offset = 0;
  Gpu gpu;
};

/// Of a segment in device memory, or of one that was staged. `device`: the GPU that will read it, by
/// this process's number; -1: its own. Makes the segment's GPU, or that one, current for this thread.
Result<DeviceView> device_view(const Lease& lease, uint32_t segment, int device);

/// Bytes that stage() needs for all segments of the lease.
Result<uint64_t> staging_bytes(const Lease& lease);
/// Copies them to the caller's device memory; see polykv_cuda_lease_stage.
Status stage(Lease& lease, int device, void* target, uint64_t target_bytes);

/// Where a producer's K and V are: on the segment's GPU (`own`; null: it has none), which `device` must be if it is not
/// -1, else on GPU `device`. POLYKV_ERR_WRONG_DEVICE.
Result<Gpu> gpu_of_producer(const Gpu* own, int device);

/// Waits for streams on which device memory of the lease may be read.
Status wait_for_streams(const Lease& lease, std::span<void* const> streams);

}  // namespace polykv::lib
