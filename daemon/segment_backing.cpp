#include "daemon/segment_backing.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "common/digest.h"
#include "common/mapping.h"
#include "common/memfd.h"

// Kernel 6.3; set by the kernel itself on a memfd made with MFD_NOEXEC_SEAL.
#ifndef F_SEAL_EXEC
#define F_SEAL_EXEC 0x0020
#endif

namespace polykv::daemon {

namespace {

constexpr int kSizeSeals = F_SEAL_GROW | F_SEAL_SHRINK;

Status corrupt(const std::string& why) {
  return {POLYKV_ERR_CORRUPT,
          "commit a segment: " + why + "; reserve it again and write it with libpolykv"};
}

Status add_write_seal(int memfd) {
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  if (seals < 0) return system_error("commit a segment: read its seals", errno);
  if ((seals & ~(F_SEAL_EXEC | F_SEAL_WRITE)) != kSizeSeals) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "commit a segment: the producer added seals of its own; leave sealing to polykvd and "
            "reserve the segment again"};
  }
  if (::fcntl(memfd, F_ADD_SEALS, F_SEAL_WRITE) == 0) return Status::ok();
  if (errno == EBUSY) {
    return {POLYKV_ERR_BUSY,
            "commit a segment: it is still mapped writable, perhaps by a forked child; unmap it "
            "everywhere and commit again"};
  }
  return system_error("commit a segment: seal it", errno);
}

Result<UniqueFd> reopen_read_only(int memfd) {
  if (::fchmod(memfd, 0400) != 0) return system_error("commit a segment: set its mode", errno);
  UniqueFd fd(::open(format("/proc/self/fd/%d", memfd).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return system_error("commit a segment: reopen it", errno, "see RLIMIT_NOFILE and /proc");
  return fd;
}

Status check_promise(const SegmentView& view, const SegmentPromise& promise) {
  const SegmentHeader& header = view.header();
  const SegmentSpec& spec = promise.spec;
  if (header.total_bytes != promise.size_bytes)
    return corrupt(format("its header says %llu bytes, %llu were reserved",
                          static_cast<unsigned long long>(header.total_bytes),
                          static_cast<unsigned long long>(promise.size_bytes)));
  if (view.profile() != spec.profile)
    return corrupt(std::string("it is of profile ") + profile_name(view.profile()) +
                   ", reserved was " + profile_name(spec.profile));
  if (view.first_token() != spec.first_token || view.token_count() != spec.token_count)
    return corrupt("it holds other tokens than were reserved");
  if (view.root_digest() != promise.root || chain_root(view.identity()) != promise.root)
    return corrupt("it is of another model than was reserved");
  if (view.parent_digest() != promise.parent || view.digests() != promise.digests)
    return corrupt("its digests are not those that were reserved");
  const auto ids = view.token_ids();
  if (ids.size() != spec.token_count ||
      std::memcmp(ids.data(), promise.document_tokens->data() + spec.first_token,
                  ids.size_bytes()) != 0) {
    return corrupt("its token ids are not those of the document");
  }
  return Status::ok();
}

Result<std::vector<LayerQuality>> qualities(const SegmentView& view) {
  const std::vector<CertificateEntry> certificate = view.certificate();
  std::vector<LayerQuality> layers(view.layer_count());
  for (uint32_t i = 0; i < layers.size(); ++i) {
    layers[i].profiles = 1U << view.layer_record(i).profile;
    if (certificate.empty() || certificate[i].query_count == 0) continue;
    const float error = certificate[i].relative_error;
    if (!(error >= 0 && std::isfinite(error)))
      return corrupt(format("the certificate of layer %u says %g", i, static_cast<double>(error)));
    layers[i].query_count = certificate[i].query_count;
    layers[i].relative_error = error;
  }
  return layers;
}

}  // namespace

Result<UniqueFd> allocate_segment(uint64_t size_bytes) {
  POLYKV_ASSIGN_OR_RETURN(UniqueFd fd, memfd_create_sealable("polykv-segment"));
  const auto size = static_cast<off_t>(size_bytes);
  while (::fallocate(fd.get(), 0, 0, size) != 0) {
    if (errno == EINTR) continue;
    if (errno == ENOSPC || errno == ENOMEM) {
      return {
          POLYKV_ERR_BUDGET,
          format("reserve memory: the machine has no %llu bytes for shared memory; see the size "
                 "limit of shared memory and free memory",
                 static_cast<unsigned long long>(size_bytes))};
    }
    return system_error("reserve memory", errno);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSizeSeals) != 0)
    return system_error("reserve memory: seal its size", errno);
  return fd;
}

bool seal_against_writing(int memfd) {
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  return seals >= 0 &&
         ((seals & F_SEAL_WRITE) != 0 || ::fcntl(memfd, F_ADD_SEALS, F_SEAL_WRITE) == 0);
}

Result<UniqueFd> seal_memfd(int memfd, uint64_t size_bytes) {
  POLYKV_RETURN_IF_ERROR(add_write_seal(memfd));
  if (::fcntl(memfd, F_ADD_SEALS, F_SEAL_SEAL) != 0)
    return system_error("commit a segment: seal its seals", errno);
  struct stat info;
  if (::fstat(memfd, &info) != 0) return system_error("commit a segment", errno);
  constexpr uint64_t kStatBlockBytes = 512;
  if (static_cast<uint64_t>(info.st_size) != size_bytes ||
      static_cast<uint64_t>(info.st_blocks) * kStatBlockBytes < size_bytes) {
    return corrupt("the producer punched holes into it");
  }
  return reopen_read_only(memfd);
}

Result<SealedSegment> verify_segment(std::span<const uint8_t> bytes, UniqueFd readable,
                                     const SegmentPromise& promise, const PayloadAccess& payload) {
  POLYKV_ASSIGN_OR_RETURN(const SegmentView view, SegmentView::open(bytes));
  POLYKV_RETURN_IF_ERROR(check_promise(view, promise));
  POLYKV_RETURN_IF_ERROR(view.verify_header_checksum());
  for (uint32_t layer = 0; layer < view.layer_count(); ++layer) {
    const LayerRecord& record = view.layer_record(layer);
    POLYKV_RETURN_IF_ERROR(payload.fetch(record.payload_offset, record.payload_bytes));
    POLYKV_RETURN_IF_ERROR(view.verify_layer_checksum(layer));
    payload.discard(record.payload_offset, record.payload_bytes);
  }
  POLYKV_ASSIGN_OR_RETURN(std::vector<LayerQuality> layers, qualities(view));
  return SealedSegment{std::move(readable), view.prefix(), std::move(layers)};
}

Result<SealedSegment> seal_and_verify(int memfd, const SegmentPromise& promise) {
  POLYKV_ASSIGN_OR_RETURN(UniqueFd readable, seal_memfd(memfd, promise.size_bytes));
  POLYKV_ASSIGN_OR_RETURN(const Mapping mapping,
                          Mapping::map(readable.get(), promise.size_bytes, MapAccess::read_only));
  const PayloadAccess all_there = {[](uint64_t, uint64_t) { return Status::ok(); },
                                   [](uint64_t, uint64_t) {}};
  return verify_segment(mapping.bytes(), std::move(readable), promise, all_there);
}

}  // namespace polykv::daemon
