// Publisher and OpenSegment: the producer's side. A ticket says who may produce; segments are
// written in place into memory that the daemon reserved, and sealed by it at the commit.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "common/fd.h"
#include "common/mapping.h"
#include "kernels/certificate.h"
#include "kernels/segment.h"
#include "libclient/cuda/encoding.h"
#include "libclient/cuda/opened_memory.h"
#include "libclient/lease.h"
#include "libclient/session.h"

namespace polykv::lib {

/// Tokens of a segment unless the producer asks for another number.
inline constexpr uint64_t kSegmentTokens = 4096;

class OpenSegment;

/// For one thread; its open segment may be encoded by many. Create with acquire().
class Publisher : public std::enable_shared_from_this<Publisher> {
 public:
  static Result<std::shared_ptr<Publisher>> create(const std::shared_ptr<Session>& session,
                                                   const wire::TicketGranted& ticket,
                                                   std::span<const uint32_t> tokens,
                                                   Profile profile);
  ~Publisher();

  const ModelIdentity& identity() const { return identity_; }
  std::span<const uint32_t> tokens() const { return tokens_; }
  Profile profile() const { return profile_; }
  uint64_t next_token() const { return next_token_; }
  uint64_t token_count() const { return tokens_.size(); }
  const Digest& digest() const { return digest_; }
  Session& session() const { return *session_; }

  /// Before begin_segment(token_count): how one of the segment's layers is best encoded, by the last
  /// queries of its tokens. Done for all layers or for none; necessary with `auto`. Different layers
  /// may be examined by several threads at once. Strides as in encode_layer.
  Status examine_layer(uint64_t token_count, uint32_t layer, KvSource source, LayerQueries queries);
  /// token_count 0: kSegmentTokens or what is left; all that is left for single-segment profiles.
  /// into_device: the payload goes to device memory by this process instead of by polykvd, which
  /// needs a GPU here; POLYKV_ERR_UNSUPPORTED where documents are in host memory.
  Result<std::unique_ptr<OpenSegment>> begin_segment(uint64_t token_count = 0,
                                                     bool into_device = false);
  /// POLYKV_ERR_STALE: the ticket was lost.
  Status progress(uint64_t tokens_done);
  /// All tokens are committed; otherwise POLYKV_ERR_INVALID_ARGUMENT, and the ticket is given up.
  Status finish();
  Result<std::unique_ptr<Lease>> finish_with_lease();
  /// A lease on what is sealed, tokens 0 .. next_token(), whoever computed it. Segments begun later
  /// say that they were computed behind decoded tokens.
  Result<std::unique_ptr<Lease>> acquire_sealed();
  /// What segments begun later say instead.
  void set_prefix_treatment(PrefixTreatment prefix) { prefix_ = prefix; }
  /// Gives the ticket up.
  void abort();

 private:
  friend class OpenSegment;
  explicit Publisher(std::shared_ptr<Session> session) : session_(std::move(session)) {}
  Status check_usable(const char* operation) const;
  Result<uint64_t> next_token_count(uint64_t wanted) const;
  Result<std::vector<LayerChoice>> choices_for(uint64_t token_count) const;

  std::shared_ptr<Session> session_;
  wire::Handle ticket_;
  ModelIdentity identity_;
  Profile profile_ = Profile::any;
  std::vector<uint32_t> tokens_;  // of the whole document
  Digest digest_{};
  uint64_t next_token_ = 0;
  struct Examined {
    uint64_t token_count = 0;  // 0: not yet
    LayerChoice choice;
  };
  std::vector<Examined> examined_;  // [layer], of the next segment
  PrefixTreatment prefix_ = PrefixTreatment::none;
  bool segment_open_ = false;
  bool ended_ = false;
};

/// A reserved segment being filled. encode_layer from many threads, different layers; the rest is
/// for one thread.
class OpenSegment {
 public:
  ~OpenSegment();
  uint64_t first_token() const { return first_token_; }
  uint64_t token_count() const { return token_count_; }

  /// Strides that are all 0 mean dense. A layer that was examined gets the same K and V again.
  Status encode_layer(uint32_t layer, KvSource source);
  /// The same on a GPU: `source` is in its memory, and `place` has what begins with the workspace. Of a segment that
  /// was begun into_device the GPU is the segment's own, and place.gpu is not looked at. Returns once it is done.
  Status encode_layer_on_device(uint32_t layer, KvSource source, EncodePlace place);
  Result<uint64_t> device_workspace_bytes(uint32_t layer);
  Status check_usable(const char* operation) const { return publisher_->check_usable(operation); }
  /// Null unless it was begun into_device.
  const Gpu* gpu() const { return device_ ? &device_->gpu() : nullptr; }
  /// Unmaps, then lets the daemon seal and verify. Once; on failure the reservation is given back.
  Status commit();
  /// Gives the reservation back.
  void abort();

 private:
  friend class Publisher;
  OpenSegment() = default;

  std::shared_ptr<Publisher> publisher_;
  wire::Handle handle_;
  uint64_t first_token_ = 0;
  uint64_t token_count_ = 0;
  uint64_t size_bytes_ = 0;
  std::vector<LayerChoice> choices_;  // [layer], if they were examined
  Status open_memory(const wire::SegmentReserved& reserved, int fd, uint64_t data_offset);
  Status move_to_device();
  void unmap() noexcept;
  Status encode_with(
      uint32_t layer, KvSource source,
      const std::function<Status(const KvSource&, std::span<const uint32_t>)>& encode);
  /// Where a byte of the payload goes; of a segment begun into_device.
  uint8_t* device_address(const uint8_t* host) const;

  /// What has the bytes that are encoded into. Of into_device: the metadata, and private memory for
  /// the payload, which the commit copies to device memory.
  Mapping mapping_;
  std::optional<device::SegmentImage> image_;
  std::optional<OpenedMemory> device_;
  std::vector<uint8_t> is_on_device_;  // a byte a layer: its payload is there already
  std::optional<SegmentWriter> writer_;
  bool ended_ = false;
};

}  // namespace polykv::lib
