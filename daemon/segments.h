// Segments as the daemon accounts for them, and the processes that hold them.
//
//   reserved -> filling -> sealed -> retiring -> gone
//
// reserved: admitted, memory not yet there. filling: the producer may write. sealed: immutable and
// verified, may be leased. retiring: no new holder; charged until the last process that received it
// has let go of it or is gone, because a memfd cannot be taken back. All of it is for the loop's
// thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "common/digest.h"
#include "common/fd.h"
#include "daemon/device_memory.h"
#include "include/internal/segment_format.h"

namespace polykv::daemon {

/// Who may see a document and its segments: a user id, or everybody.
using Domain = uint64_t;
inline constexpr Domain kPublicDomain = ~Domain{0};

enum class SegmentState { reserved, filling, sealed, retiring, gone };

/// How a layer is stored; of several segments, all their profiles and the worst certificate.
struct LayerQuality {
  uint32_t profiles = 0;     // bit p: Profile p
  uint32_t query_count = 0;  // 0: there is no certificate
  float relative_error = 0;
};

struct Segment {
  SegmentState state = SegmentState::reserved;
  uint64_t first_token = 0;
  uint64_t token_count = 0;
  uint64_t size_bytes = 0;
  uint64_t charged_bytes = 0;                // what it takes of the backing's memory
  std::shared_ptr<const UniqueFd> writable;  // until it is sealed; shared with the thread pool
  std::shared_ptr<const UniqueFd> readable;  // O_RDONLY; from sealed on; shared with output queues
  SharedDeviceMemory device;                 // with its payload; null: all of it is in the memfd
  uint32_t holder_count = 0;                 // processes
  uint32_t document_count = 0;   // documents that it is part of, complete or not; 0: it retires
  uint32_t lingering_count = 0;  // retired documents whose leases may still be sent it

  std::vector<LayerQuality> layers;  // from sealed on

  // From sealed on, for those that continue it; see PrefixIndex.
  PrefixTreatment prefix = PrefixTreatment::none;
  std::shared_ptr<Segment> parent;  // has the tokens before first_token; null at 0
  Domain domain = 0;
  Profile profile = Profile::any;
  Digest start{};               // chain digest at the last multiple of 256 <= first_token
  std::vector<Digest> digests;  // chain digests at the multiples of 256 in (first_token, end]
  std::shared_ptr<const std::vector<uint32_t>> tokens;  // 0 .. end at least

  uint64_t end_token() const { return first_token + token_count; }
};

/// The first token_count tokens of a segment.
struct SegmentPart {
  std::shared_ptr<Segment> segment;
  uint64_t token_count = 0;
};
/// The first token behind parts that follow each other from token 0 on.
inline uint64_t end_of(const std::vector<SegmentPart>& parts) {
  return parts.empty() ? 0 : parts.back().segment->first_token + parts.back().token_count;
}

/// A client process, however many connections it has. It outlives its connections while it holds
/// segments.
struct Process {
  pid_t pid = 0;
  uid_t uid = 0;
  UniqueFd pidfd;
  bool is_gone = false;
  uint32_t connection_count = 0;

  struct Holding {
    std::shared_ptr<Segment> segment;
    uint64_t count = 0;  // it may hold a segment by several leases
  };
  std::map<const Segment*, Holding> holdings;
};

class Segments {
 public:
  /// Charges charged_bytes (0: size_bytes). Admission was asked before.
  std::shared_ptr<Segment> reserve(uint64_t first_token, uint64_t token_count, uint64_t size_bytes,
                                   uint64_t charged_bytes = 0);
  /// reserved -> filling.
  void fill(Segment& segment, std::shared_ptr<const UniqueFd> writable,
            SharedDeviceMemory device = nullptr);
  /// filling -> sealed.
  void seal(Segment& segment, UniqueFd readable);
  /// Any earlier state -> retiring, and at once -> gone when nobody holds it.
  void retire(Segment& segment);

  /// The process has received the segment (or is about to), once more.
  void hold(Process& process, const std::shared_ptr<Segment>& segment);
  /// The process has let go of it once.
  void release(Process& process, const Segment& segment);
  /// The process is gone.
  void release_all(Process& process);

  uint64_t stored_bytes() const { return stored_bytes_; }
  uint64_t retiring_bytes() const { return retiring_bytes_; }
  uint64_t charged_bytes() const { return stored_bytes_ + retiring_bytes_; }
  /// Reserved, but the machine does not count it yet.
  uint64_t unallocated_bytes() const { return unallocated_bytes_; }
  /// All that are not gone.
  uint64_t segment_count() const { return segment_count_; }

 private:
  void drop_holder(Segment& segment);
  void end(Segment& segment);

  uint64_t stored_bytes_ = 0;
  uint64_t retiring_bytes_ = 0;
  uint64_t unallocated_bytes_ = 0;
  uint64_t segment_count_ = 0;
};

}  // namespace polykv::daemon
