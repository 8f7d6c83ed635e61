#include "tests/gpu/gpu_bench/document.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/half.h"
#include "kernels/profiles.h"
#include "libclient/cuda/on_device.h"

namespace polykv::bench {

namespace {

constexpr uint64_t kAlignment = 256;  // of a payload in device memory

constexpr Strides kDense{kGeometry.k_head_dim,
                         int64_t{kGeometry.kv_head_count} * kGeometry.k_head_dim, 1};

size_t value_count(uint64_t tokens) {
  return tokens * kGeometry.kv_head_count * kGeometry.k_head_dim;
}

/// The relative error of Gaussian rows in so many bits: that of Lloyd and Max's levels, and of even ones at 8.
double expected_error(uint32_t bits) {
  constexpr double kErrors[] = {0.186, 0.0975, 0.0499, 0.0257};
  return bits == 8 ? 0.0065 : kErrors[bits - 3];
}

/// What a profile may lose of K or V.
double most_lost(Profile profile, bool is_k) {
  if (profile == Profile::exact) return 1e-6;
  if (profile == Profile::paper_k8v3) return is_k ? 0.02 : 0.2;  // one scale for a layer's keys
  const ProfileRule& rule = *profile_rule(profile);
  return 1.1 * expected_error(is_k ? rule.k.bits : rule.v.bits);
}

}  // namespace

void verify(bool is_right, const char* what, double relative_error) {
  if (!is_right) throw WrongResult(format("%s is wrong: relative error %g", what, relative_error));
}

std::vector<float> as_floats(const std::vector<uint16_t>& halves) {
  std::vector<float> floats(halves.size());
  for (size_t i = 0; i < halves.size(); ++i) floats[i] = f32_from_f16(halves[i]);
  return floats;
}

std::vector<uint16_t> random_halves(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(count);
  // As many different ones as matter to a codec, repeated at a distance that is no multiple of a row.
  const size_t period = std::min<size_t>(count, 8'388'593);
  for (size_t i = 0; i < period; ++i) values[i] = f16_from_f32(normal(random));
  for (size_t i = period; i < count; ++i) values[i] = values[i - period];
  return values;
}

BenchDocument::BenchDocument(Profile profile, uint64_t token_count, uint64_t segment_tokens,
                             uint64_t packed_bytes)
    : profile_(profile),
      token_count_(token_count),
      value_count_(value_count(token_count)),
      copy_count_(packed_bytes / (4 * value_count_) + 1),
      k_(random_halves(copy_count_ * value_count_, 1)),
      v_(random_halves(copy_count_ * value_count_, 2)),
      k_out_(k_.count()),
      v_out_(v_.count()) {
  if (is_single_segment(profile)) segment_tokens = token_count;
  uint64_t workspace_bytes = 0;
  for (uint64_t first = 0; first < token_count; first += segment_tokens) {
    Segment segment = plan(first, std::min(segment_tokens, token_count - first));
    segment.offset = layer_bytes_;
    layer_bytes_ += (segment.payload.size() + kAlignment - 1) / kAlignment * kAlignment;
    workspace_bytes = std::max(workspace_bytes, cuda::encode_workspace_bytes(segment.slot));
    segments_.push_back(std::move(segment));
  }
  layer_count_ = std::max<size_t>(2, packed_bytes / layer_bytes_ + 1);
  payloads_ = std::make_unique<Buffer<uint8_t>>(this->packed_bytes());
  workspace_ = std::make_unique<Buffer<uint8_t>>(workspace_bytes);
  outcomes_ = std::make_unique<Buffer<cuda::EncodeOutcome>>(segments_.size());
  check(cudaMemset(payloads_->get(), 0, this->packed_bytes()), "zero");
  for (size_t layer = 0; layer < layer_count_; ++layer) {
    // The list of exact rows, which the document's first four tokens are, is in the payload.
    for (const Segment& segment : segments_) {
      check(cudaMemcpy(place(segment, layer), segment.payload.data(), segment.payload.size(),
                       cudaMemcpyHostToDevice),
            "copy");
    }
    encode(layer);
  }
  check(cudaDeviceSynchronize(), "encode");
  const std::vector<cuda::EncodeOutcome> outcomes = outcomes_->host();
  for (size_t i = 0; i < segments_.size(); ++i) {
    Segment& segment = segments_[i];
    check(cuda::encode_status(outcomes[i], profile, Dtype::f16));
    segment.scales = outcomes[i].scales;
    check(cudaMemcpy(segment.payload.data(), place(segment, layer_count_ - 1),
                     segment.payload.size(), cudaMemcpyDeviceToHost),
          "copy");
  }
}

BenchDocument::Segment BenchDocument::plan(uint64_t first_token, uint64_t token_count) const {
  Segment segment;
  segment.first_token = first_token;
  segment.token_count = token_count;
  SegmentSpec spec;
  spec.identity.source_dtype = Dtype::f16;
  spec.identity.layers = {kGeometry};
  spec.profile = profile_;
  spec.first_token = first_token;
  spec.token_count = token_count;
  spec.digest_count =
      segment_digest_count(first_token, token_count, first_token + token_count == token_count_);
  const Result<SegmentLayout> layout = plan_segment(spec);
  check(layout.status());
  constexpr size_t kSegmentAlignment = 64;
  size_t room = layout->header.total_bytes + kSegmentAlignment;
  segment.storage = std::make_unique<uint8_t[]>(room);
  void* aligned = segment.storage.get();
  std::align(kSegmentAlignment, layout->header.total_bytes, aligned, room);
  const std::span<uint8_t> bytes(static_cast<uint8_t*>(aligned), layout->header.total_bytes);
  const std::vector<uint32_t> ids(token_count);
  const std::vector<Digest> digests(spec.digest_count);
  Result<SegmentWriter> writer = SegmentWriter::create(spec, {ids, {}, digests}, bytes);
  check(writer.status());
  segment.writer = std::make_unique<SegmentWriter>(std::move(*writer));
  check(segment.writer->fill_layer(0, {}, [&](LayerSlot& slot) {
    segment.slot = slot;
    return Status::ok();
  }));
  segment.payload = segment.writer->layer_payload(0);
  return segment;
}

LayerView BenchDocument::host_view(const Segment& segment) {
  const LayerSlot& slot = segment.slot;
  return {slot.geometry,
          slot.source_dtype,
          slot.profile,
          slot.token_count,
          slot.block_bytes,
          slot.block_count,
          slot.exact_row_capacity,
          slot.exact_row_count,
          segment.scales,
          slot.k_means,
          slot.exact_tokens,
          slot.exact_k,
          slot.exact_v,
          slot.blocks};
}

std::vector<LayerView> BenchDocument::host_views() const {
  std::vector<LayerView> views;
  for (const Segment& segment : segments_) views.push_back(host_view(segment));
  return views;
}

std::vector<cuda::ChecksumRange> BenchDocument::payloads() const {
  std::vector<cuda::ChecksumRange> ranges;
  for (size_t layer = 0; layer < layer_count_; ++layer) {
    for (const Segment& segment : segments_)
      ranges.push_back({place(segment, layer), segment.payload.size()});
  }
  return ranges;
}

std::vector<cuda::AttendRun> BenchDocument::runs(size_t layer) const {
  std::vector<cuda::AttendRun> runs;
  for (const Segment& segment : segments_) {
    runs.push_back(
        {lib::on_device(host_view(segment), segment.payload.data(), place(segment, layer)),
         segment.first_token, 0, segment.token_count});
  }
  return runs;
}

void BenchDocument::encode(size_t layer) {
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    const size_t first = first_value(layer) + value_count(segment.first_token);
    const KvSource source{Dtype::f16, k_.get() + first, kDense, v_.get() + first, kDense};
    check(cuda::encode(source,
                       lib::on_device(segment.slot, segment.payload.data(), place(segment, layer)),
                       {workspace_->get(), workspace_->count()}, outcomes_->get() + i, nullptr));
  }
}

void BenchDocument::decode(size_t layer) {
  for (const Segment& segment : segments_) {
    const size_t first = first_value(layer) + value_count(segment.first_token);
    const DecodeTarget target{0,      segment.token_count,  Dtype::f16, k_out_.get() + first,
                              kDense, v_out_.get() + first, kDense};
    check(cuda::decode(
        lib::on_device(host_view(segment), segment.payload.data(), place(segment, layer)), target,
        nullptr));
  }
}

void BenchDocument::verify_coding() {
  std::vector<float> k_want(value_count_);
  std::vector<float> v_want(value_count_);
  for (const Segment& segment : segments_) {
    const size_t first = value_count(segment.first_token);
    codec_for(profile_)->decode(
        host_view(segment),
        {0, segment.token_count, Dtype::f32, &k_want[first], kDense, &v_want[first], kDense});
  }
  const size_t layer = layer_count_ - 1;
  const auto compare = [&](const std::vector<float>& got, const Buffer<uint16_t>& want,
                           const char* what, double most) {
    const double error =
        relative_error(got, as_floats(want.host(first_value(layer), value_count_)));
    verify(error < most, what, error);
  };
  compare(k_want, k_, "encode K", most_lost(profile_, true));
  compare(v_want, v_, "encode V", most_lost(profile_, false));
  k_out_.spoil();
  v_out_.spoil();
  decode(layer);
  check(cudaDeviceSynchronize(), "decode");
  compare(k_want, k_out_, "decode K", 1e-3);
  compare(v_want, v_out_, "decode V", 1e-3);
}

void BenchDocument::verify_checksums() const {
  const std::vector<cuda::ChecksumRange> ranges = payloads();
  const Buffer<uint64_t> sums(ranges.size());
  sums.spoil();
  check(cuda::checksum(ranges, sums.get(), nullptr));
  check(cudaDeviceSynchronize(), "checksum");
  const std::vector<uint64_t> got = sums.host();
  const size_t last = ranges.size() - segments_.size();
  for (size_t i = 0; i < segments_.size(); ++i) {
    const std::span<const uint8_t> payload = segments_[i].payload;
    verify(got[last + i] == XXH3_64bits(payload.data(), payload.size()), "checksum", 1);
  }
}

}  // namespace polykv::bench
