// The memory of one segment: allocate, seal, verify. Slow, so for the thread pool; functions are
// thread-safe.
//
// Order on commit: the size seals that we set must be the only ones; then F_SEAL_WRITE, which the
// kernel refuses while any writable mapping exists, a forked child's included; then F_SEAL_SEAL;
// and only then are holes, header, bounds, checksums and contents checked. What was verified can
// never change again.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "common/fd.h"
#include "common/result.h"
#include "daemon/segments.h"
#include "kernels/segment.h"

namespace polykv::daemon {

/// A memfd of that size with all its pages present and its size sealed. POLYKV_ERR_BUDGET when the
/// memory is not there after all.
Result<UniqueFd> allocate_segment(uint64_t size_bytes);

/// What the daemon told the producer it reserved.
struct SegmentPromise {
  SegmentSpec spec;
  uint64_t size_bytes = 0;
  uint64_t data_offset = 0;  // of the payload
  bool into_device = false;  // the producer writes the payload to device memory
  Digest root{};
  Digest parent{};
  std::vector<Digest> digests;
  std::shared_ptr<const std::vector<uint32_t>> document_tokens;
};

/// What a verified segment is handed out by, and what only its header says.
struct SealedSegment {
  UniqueFd readable;  // the segment; in device memory: what is before its payload
  PrefixTreatment prefix = PrefixTreatment::none;
  std::vector<LayerQuality> layers;
};

/// Seals the memfd and returns an O_RDONLY reopening of it (mode 0400) whose bytes were verified
/// against the promise. POLYKV_ERR_BUSY: it is still mapped writable, nothing has changed and the
/// commit may be repeated. POLYKV_ERR_INVALID_ARGUMENT: the producer added seals of its own.
/// POLYKV_ERR_CORRUPT: holes, or the bytes are not what was promised.
Result<SealedSegment> seal_and_verify(int memfd, const SegmentPromise& promise);

/// Seals a memfd of that size and returns an O_RDONLY reopening of it. Errors as below.
Result<UniqueFd> seal_memfd(int memfd, uint64_t size_bytes);

/// How a payload gets into the bytes that verify_segment() looks at, and out of them again: ranges of
/// the segment.
struct PayloadAccess {
  std::function<Status(uint64_t offset, uint64_t size_bytes)> fetch;
  std::function<void(uint64_t offset, uint64_t size_bytes)> discard;
};

/// Verifies a segment against the promise: `bytes` are size_bytes of it, the payloads a layer at a
/// time. `readable` becomes the result's.
Result<SealedSegment> verify_segment(std::span<const uint8_t> bytes, UniqueFd readable,
                                     const SegmentPromise& promise, const PayloadAccess& payload);

/// Whether nobody can write to the memfd any more: adds F_SEAL_WRITE, fast.
bool seal_against_writing(int memfd);

}  // namespace polykv::daemon
