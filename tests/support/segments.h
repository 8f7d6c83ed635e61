// Segments in memory for tests: synthetic K and V, and a segment built from them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/digest.h"
#include "kernels/segment.h"

namespace polykv::test {

inline constexpr Profile kAllProfiles[] = {Profile::exact, Profile::paper_k8v3, Profile::k8v8,
                                           Profile::k6v5,  Profile::k5v4,       Profile::k8v3,
                                           Profile::k4v3};

/// The first token of a segment that has no sinks, so that every exact row is a chosen one; of paper-k8v3, which
/// is one segment, the first.
inline uint64_t later_token(Profile profile) {
  return profile == Profile::paper_k8v3 ? 0 : 4096;
}

/// 4096-byte aligned bytes of an exact length, so that the address sanitizer sees a read behind the
/// end.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t size_bytes) : size_bytes_(size_bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 4096, size_bytes == 0 ? 1 : size_bytes) != 0)
      throw std::bad_alloc();
    bytes_.reset(static_cast<uint8_t*>(memory));
    // A segment must not depend on what its bytes were.
    std::fill_n(bytes_.get(), size_bytes, uint8_t{0xa5});
  }
  std::span<uint8_t> span() { return {bytes_.get(), size_bytes_}; }
  std::span<const uint8_t> span() const { return {bytes_.get(), size_bytes_}; }

 private:
  struct Free {
    void operator()(uint8_t* bytes) const { std::free(bytes); }
  };
  std::unique_ptr<uint8_t, Free> bytes_;
  size_t size_bytes_;
};

/// K and V of one layer, fp32 [kv_head, token, head_dim].
struct LayerValues {
  LayerGeometry geometry;
  uint64_t token_count = 0;
  std::vector<float> k;
  std::vector<float> v;

  KvSource source() const {
    const auto strides = [&](uint32_t dim) {
      return Strides{static_cast<int64_t>(token_count) * dim, dim, 1};
    };
    return {Dtype::f32, k.data(), strides(geometry.k_head_dim), v.data(),
            strides(geometry.v_head_dim)};
  }
};

inline LayerValues empty_values(const LayerGeometry& geometry, uint64_t token_count) {
  const uint64_t rows = geometry.kv_head_count * token_count;
  return {geometry, token_count, std::vector<float>(rows * geometry.k_head_dim),
          std::vector<float>(rows * geometry.v_head_dim)};
}

/// Gaussian values; each K dimension has an offset of its own, as keys have.
inline LayerValues random_values(const LayerGeometry& geometry, uint64_t token_count,
                                 uint32_t seed) {
  LayerValues values = empty_values(geometry, token_count);
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> offset(geometry.k_head_dim);
  for (float& value : offset) value = 3 * normal(engine);
  for (size_t i = 0; i < values.k.size(); ++i)
    values.k[i] = normal(engine) + offset[i % geometry.k_head_dim];
  for (float& value : values.v) value = normal(engine);
  return values;
}

inline ModelIdentity test_model(std::vector<LayerGeometry> layers,
                                Dtype source_dtype = Dtype::f32) {
  ModelIdentity identity;
  identity.fingerprint[0] = 7;
  identity.source_dtype = source_dtype;
  identity.rope = {RopeKind::half_rotation, RopeScaling::none, 64, 10000.0, 1.0, 0};
  identity.layers = std::move(layers);
  return identity;
}

struct SegmentOptions {
  uint64_t first_token = 0;
  uint32_t chosen_exact_rows = 0;
  std::vector<uint32_t> chosen;  // of every layer
  bool has_certificate = false;
  Backend backend = active_backend();
};

inline SegmentSpec test_spec(const ModelIdentity& identity, Profile profile, uint64_t token_count,
                             const SegmentOptions& options = {}) {
  SegmentSpec spec;
  spec.identity = identity;
  spec.profile = profile;
  spec.first_token = options.first_token;
  spec.token_count = token_count;
  spec.digest_count = segment_digest_count(options.first_token, token_count, true);
  spec.chosen_exact_rows = options.chosen_exact_rows;
  spec.has_certificate = options.has_certificate;
  return spec;
}

inline std::vector<uint32_t> test_ids(uint64_t token_count) {
  std::vector<uint32_t> ids(token_count);
  for (uint64_t i = 0; i < token_count; ++i) ids[i] = static_cast<uint32_t>(i * 7919 % 49152);
  return ids;
}

/// Throws what failed; an encoder's error is returned.
inline Result<AlignedBytes> try_build_segment(const SegmentSpec& spec,
                                              const std::vector<LayerValues>& layers,
                                              const SegmentOptions& options = {}) {
  const Result<uint64_t> size = segment_size_bytes(spec);
  if (!size.is_ok()) return size.status();
  AlignedBytes bytes(*size);
  const std::vector<uint32_t> ids = test_ids(spec.token_count);
  std::vector<Digest> digests(spec.digest_count);
  for (size_t i = 0; i < digests.size(); ++i) digests[i].fill(static_cast<uint8_t>(i + 1));
  const SegmentContents contents{ids, chain_root(spec.identity), digests, PrefixTreatment::none};
  Result<SegmentWriter> writer = SegmentWriter::create(spec, contents, bytes.span());
  if (!writer.is_ok()) return writer.status();
  for (uint32_t layer = 0; layer < layers.size(); ++layer) {
    Status status =
        writer->encode_layer(layer, layers[layer].source(), options.chosen, options.backend);
    if (!status.is_ok()) return status;
  }
  Status status = writer->finish();
  if (!status.is_ok()) return status;
  return bytes;
}

inline AlignedBytes build_segment(const SegmentSpec& spec, const std::vector<LayerValues>& layers,
                                  const SegmentOptions& options = {}) {
  Result<AlignedBytes> bytes = try_build_segment(spec, layers, options);
  if (!bytes.is_ok()) throw std::runtime_error(bytes.status().message());
  return std::move(bytes).value();
}

inline SegmentView open_segment(const AlignedBytes& bytes) {
  Result<SegmentView> view = SegmentView::open(bytes.span());
  if (!view.is_ok()) throw std::runtime_error(view.status().message());
  return *view;
}

/// The whole layer in fp32, [kv_head, token, head_dim].
inline LayerValues decode_all(const SegmentView& view, uint32_t layer,
                              Backend backend = active_backend()) {
  const LayerView parts = view.layer(layer);
  LayerValues values = empty_values(parts.geometry, view.token_count());
  const KvSource where = values.source();
  DecodeTarget target;
  target.token_count = view.token_count();
  target.k = values.k.data();
  target.k_strides = where.k_strides;
  target.v = values.v.data();
  target.v_strides = where.v_strides;
  const Status status = decode_layer(view, layer, target, backend);
  if (!status.is_ok()) throw std::runtime_error(status.message());
  return values;
}

}  // namespace polykv::test
