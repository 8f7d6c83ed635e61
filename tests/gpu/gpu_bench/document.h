// A document of Gaussian K and V in device memory, as polykvd would hold it: layers that are all alike, each in segments.
// 8 kv_heads, head_dim 128, fp16.
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "kernels/cuda/launch.h"
#include "kernels/segment.h"
#include "tests/gpu/gpu_bench/cuda.h"
#include "tests/support/relative_error.h"

namespace polykv::bench {

using test::relative_error;

inline constexpr LayerGeometry kGeometry{8, 128, 128, 0};

/// A kernel's result is not the processor's.
struct WrongResult : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// Throws WrongResult.
void verify(bool is_right, const char* what, double relative_error);

std::vector<float> as_floats(const std::vector<uint16_t>& halves);
/// Gaussian, fp16.
std::vector<uint16_t> random_halves(size_t count, uint64_t seed);

class BenchDocument {
 public:
  /// packed_bytes: at least so many, of all layers; two layers at least. Encodes all of it.
  BenchDocument(Profile profile, uint64_t token_count, uint64_t segment_tokens,
                uint64_t packed_bytes);

  size_t layer_count() const { return layer_count_; }
  uint64_t token_count() const { return token_count_; }
  /// Of all layers.
  uint64_t packed_bytes() const { return layer_bytes_ * layer_count_; }
  uint64_t raw_bytes() const { return 4 * value_count_ * layer_count_; }
  std::vector<cuda::ChecksumRange> payloads() const;
  /// What attention reads.
  std::vector<cuda::AttendRun> runs(size_t layer) const;

  /// Queued on the default stream: from K and V, over what was encoded before; into fp16. A call a segment, as libpolykv
  /// makes them.
  void encode(size_t layer);
  void decode(size_t layer);

  /// The same bytes in host memory, of the last layer: what the processor makes of them.
  std::vector<LayerView> host_views() const;
  /// Each throws WrongResult. Codes must decode to something as close to the source as a profile is, and on the device to
  /// what they decode to on the processor.
  void verify_coding();
  void verify_checksums() const;

 private:
  /// A segment of one layer: where everything is, and in the end the last layer's bytes.
  struct Segment {
    uint64_t first_token = 0;
    uint64_t token_count = 0;
    std::unique_ptr<uint8_t[]> storage;
    std::unique_ptr<SegmentWriter> writer;
    std::span<uint8_t> payload;
    LayerSlot slot{};
    LayerScales scales{};
    uint64_t offset = 0;  // of the payload in a layer's bytes
  };

  Segment plan(uint64_t first_token, uint64_t token_count) const;
  uint8_t* place(const Segment& segment, size_t layer) const {
    return payloads_->get() + layer * layer_bytes_ + segment.offset;
  }
  static LayerView host_view(const Segment& segment);

  /// Where a layer's K and V, and what they decode to, begin.
  size_t first_value(size_t layer) const { return layer % copy_count_ * value_count_; }

  Profile profile_;
  uint64_t token_count_;
  size_t value_count_;  // of K, and of V, of a layer
  size_t copy_count_;   // so many layers have K and V of their own, which no cache holds together
  std::vector<Segment> segments_;
  uint64_t layer_bytes_ = 0;
  size_t layer_count_ = 0;
  Buffer<uint16_t> k_;  // [copy, token, kv_head, dim]
  Buffer<uint16_t> v_;
  Buffer<uint16_t> k_out_;
  Buffer<uint16_t> v_out_;
  std::unique_ptr<Buffer<uint8_t>> payloads_;  // [layer, segment]
  std::unique_ptr<Buffer<uint8_t>> workspace_;
  std::unique_ptr<Buffer<cuda::EncodeOutcome>> outcomes_;  // [segment], of the layer encoded last
};

}  // namespace polykv::bench
