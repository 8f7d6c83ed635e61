#include "kernels/certificate.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>

#include "kernels/cpu/attention_rows.h"
#include "kernels/cpu/tensors.h"

namespace polykv {

namespace {

constexpr uint32_t kChunkTokens = 4 * kBlockTokens;  // decoded at a time
constexpr uint32_t kTileRows = 16;                   // queries that meet a chunk together

/// Tokens of all kv_heads as dense fp32: [kv_head, kChunkTokens, head_dim].
struct Chunk {
  explicit Chunk(const LayerGeometry& geometry)
      : k(size_t{geometry.kv_head_count} * kChunkTokens * geometry.k_head_dim),
        v(size_t{geometry.kv_head_count} * kChunkTokens * geometry.v_head_dim) {}
  std::vector<float> k;
  std::vector<float> v;
};
using LoadChunk = std::function<Status(uint64_t first_token, uint32_t count, Chunk& chunk)>;

void load_tensor(const cpu::SourceTensor& source, uint32_t head_count, uint64_t first,
                 uint32_t count, float* out) {
  cpu::BlockReader reader(source);
  for (uint32_t head = 0; head < head_count; ++head) {
    float* rows = out + size_t{head} * kChunkTokens * source.head_dim;
    for (uint32_t done = 0; done < count; done += kBlockTokens) {
      const cpu::Rows block = reader.read(head, first + done, std::min(kBlockTokens, count - done));
      for (uint32_t i = 0; i < block.count; ++i) {
        const float* row = block.data + i * block.stride;
        std::copy(row, row + source.head_dim, rows + size_t{done + i} * source.head_dim);
      }
    }
  }
}

LoadChunk chunks_of(const KvSource& source, const LayerGeometry& geometry) {
  return [=](uint64_t first, uint32_t count, Chunk& chunk) {
    load_tensor(cpu::source_k(source, geometry), geometry.kv_head_count, first, count,
                chunk.k.data());
    load_tensor(cpu::source_v(source, geometry), geometry.kv_head_count, first, count,
                chunk.v.data());
    return Status::ok();
  };
}

LoadChunk chunks_of(const SegmentView& view) {
  return [&view](uint64_t first, uint32_t count, Chunk& chunk) {
    const LayerGeometry geometry = view.layer(0).geometry;
    const auto dense = [](int64_t dim) { return Strides{kChunkTokens * dim, dim, 1}; };
    return decode_layer(view, 0,
                        {first, count, Dtype::f32, chunk.k.data(), dense(geometry.k_head_dim),
                         chunk.v.data(), dense(geometry.v_head_dim)});
  };
}

/// Some rows' logits for the tokens of a chunk.
struct Tile {
  size_t row;  // the first
  size_t rows;
  float* scores;  // [row, count]
  uint64_t first;
  uint32_t count;
  const float* values;  // [count, v_head_dim]
};

/// The queries' attention to a segment's tokens. Rows are [head, row].
class Judge {
 public:
  static Result<Judge> create(const LayerSpec& spec, const LayerQueries& queries);

  /// Normalised outputs, [head, row, v_head_dim]; empty: a logit is not finite.
  Result<std::vector<float>> attend(const LoadChunk& load);
  /// After attend(): how much attention each token drew with these keys, over all rows.
  Result<std::vector<double>> shares(const LoadChunk& load);

 private:
  Judge(const LayerSpec& spec, const LayerQueries& queries) : spec_(spec), queries_(queries) {}
  size_t row_count() const { return size_t{queries_.head_count} * queries_.row_count; }
  /// Calls use(Tile) for all rows and tokens. False: a logit is not finite.
  template <typename Use>
  Result<bool> for_each_tile(const LoadChunk& load, Use use);
  /// The tokens of [first, first + count) that a row sees, as [low, high) of these.
  std::pair<uint32_t, uint32_t> seen(size_t row, uint64_t first, uint32_t count) const;

  const LayerSpec& spec_;
  const LayerQueries& queries_;
  std::vector<float> q_;              // [head, row, k_head_dim], scaled
  std::vector<SoftmaxState> states_;  // [head, row]
};

Status wrong_queries(std::string why) {
  return {POLYKV_ERR_INVALID_ARGUMENT, "judge by queries: " + std::move(why)};
}

Result<Judge> Judge::create(const LayerSpec& spec, const LayerQueries& queries) {
  const uint32_t kv_heads = spec.geometry.kv_head_count;
  if (queries.q == nullptr || !dtype_is_valid(static_cast<uint32_t>(queries.dtype)))
    return wrong_queries("they are missing, or of an unknown dtype");
  if (queries.head_count == 0 || queries.head_count % kv_heads != 0 ||
      queries.head_count > kMaxKvHeads * 64) {
    return wrong_queries(
        format("%u heads do not share %u kv_heads evenly", queries.head_count, kv_heads));
  }
  if (queries.row_count == 0 || queries.row_count > spec.token_count ||
      queries.row_count > kMaxCertificateQueries) {
    return wrong_queries(
        format("%u rows; give 1 to %u, those of the segment's last tokens, of which it has %llu",
               queries.row_count, kMaxCertificateQueries,
               static_cast<unsigned long long>(spec.token_count)));
  }
  if (!std::isfinite(queries.scale) || !(queries.soft_cap >= 0) || !std::isfinite(queries.soft_cap))
    return wrong_queries("scale or soft-cap is not finite, or the soft-cap negative");
  Judge judge(spec, queries);
  const uint32_t dim = spec.geometry.k_head_dim;
  const float scale =
      queries.scale != 0 ? queries.scale : 1.0F / std::sqrt(static_cast<float>(dim));
  judge.q_.resize(judge.row_count() * dim);
  const cpu::SourceTensor source{queries.q, queries.dtype, queries.strides, dim, true};
  for (uint32_t head = 0; head < queries.head_count; ++head) {
    for (uint32_t row = 0; row < queries.row_count; ++row) {
      for (uint32_t i = 0; i < dim; ++i) {
        const float value = source.at(head, row, i);
        if (!std::isfinite(value))
          return wrong_queries(format("row %u of head %u holds %g", row, head, value));
        judge.q_[(size_t{head} * queries.row_count + row) * dim + i] = value * scale;
      }
    }
  }
  return judge;
}

std::pair<uint32_t, uint32_t> Judge::seen(size_t row, uint64_t first, uint32_t count) const {
  const uint64_t end =  // behind the row's own token
      spec_.token_count - queries_.row_count + row % queries_.row_count + 1;
  const uint64_t window = spec_.geometry.sliding_window;
  const uint64_t begin = window == 0 || window >= end ? 0 : end - window;
  const auto within = [&](uint64_t token) {
    return static_cast<uint32_t>(std::clamp(token, first, first + count) - first);
  };
  return {within(begin), within(end)};
}

template <typename Use>
Result<bool> Judge::for_each_tile(const LoadChunk& load, Use use) {
  const LayerGeometry& geometry = spec_.geometry;
  const size_t group_rows = row_count() / geometry.kv_head_count;
  Chunk chunk(geometry);
  std::vector<float> scores(size_t{kTileRows} * kChunkTokens);
  for (uint64_t first = 0; first < spec_.token_count; first += kChunkTokens) {
    const auto count =
        static_cast<uint32_t>(std::min<uint64_t>(kChunkTokens, spec_.token_count - first));
    POLYKV_RETURN_IF_ERROR(load(first, count, chunk));
    for (uint32_t head = 0; head < geometry.kv_head_count; ++head) {
      const float* keys = &chunk.k[size_t{head} * kChunkTokens * geometry.k_head_dim];
      const float* values = &chunk.v[size_t{head} * kChunkTokens * geometry.v_head_dim];
      for (size_t done = 0; done < group_rows; done += kTileRows) {
        const size_t row = head * group_rows + done;
        const size_t rows = std::min<size_t>(kTileRows, group_rows - done);
        attention_rows().few_scores(&q_[row * geometry.k_head_dim], rows, keys, count,
                                    geometry.k_head_dim, scores.data());
        for (size_t i = 0; i < rows * count; ++i) {
          // The other kernels must not meet an infinity.
          if (!std::isfinite(scores[i])) return false;
          if (queries_.soft_cap > 0)
            scores[i] = queries_.soft_cap * std::tanh(scores[i] / queries_.soft_cap);
        }
        use(Tile{row, rows, scores.data(), first, count, values});
      }
    }
  }
  return true;
}

Result<std::vector<float>> Judge::attend(const LoadChunk& load) {
  const AttentionRows& kernels = attention_rows();
  const size_t dim = spec_.geometry.v_head_dim;
  std::vector<float> outputs(row_count() * dim);
  states_.assign(row_count(), SoftmaxState());
  POLYKV_ASSIGN_OR_RETURN(const bool finite, for_each_tile(load, [&](const Tile& tile) {
                            for (size_t i = 0; i < tile.rows; ++i) {
                              float* scores = tile.scores + i * tile.count;
                              const auto [low, high] = seen(tile.row + i, tile.first, tile.count);
                              std::fill(scores, scores + low, 0.0F);
                              if (low == high) {
                                std::fill(scores + low, scores + tile.count, 0.0F);
                                continue;
                              }
                              float* output = &outputs[(tile.row + i) * dim];
                              const float rescale =
                                  kernels.softmax_block(scores + low, high - low, tile.count - low,
                                                        &states_[tile.row + i]);
                              if (rescale != 1.0F) kernels.scale(output, rescale, dim, output);
                            }
                            kernels.few_outputs(tile.scores, tile.rows, tile.values, tile.count,
                                                dim, &outputs[tile.row * dim]);
                          }));
  if (!finite) outputs.clear();
  for (size_t row = 0; row < outputs.size() / std::max<size_t>(dim, 1); ++row)
    kernels.scale(&outputs[row * dim], 1.0F / states_[row].sum, dim, &outputs[row * dim]);
  return outputs;
}

Result<std::vector<double>> Judge::shares(const LoadChunk& load) {
  std::vector<double> shares(spec_.token_count);
  POLYKV_ASSIGN_OR_RETURN(
      const bool finite, for_each_tile(load, [&](const Tile& tile) {
        for (size_t i = 0; i < tile.rows; ++i) {
          float* weights = tile.scores + i * tile.count;
          const auto [low, high] = seen(tile.row + i, tile.first, tile.count);
          if (low == high) continue;
          SoftmaxState here;
          attention_rows().softmax_block(weights + low, high - low, high - low, &here);
          const SoftmaxState& all = states_[tile.row + i];
          const double factor =
              std::exp(static_cast<double>(here.maximum) - static_cast<double>(all.maximum)) /
              static_cast<double>(all.sum);
          for (uint32_t token = low; token < high; ++token)
            shares[tile.first + token] += static_cast<double>(weights[token]) * factor;
        }
      }));
  assert(finite && "attend() met the same logits");
  return shares;
}

/// ||got - want|| / ||want||
float relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const auto exact = static_cast<double>(want[i]);
    difference += std::pow(static_cast<double>(got[i]) - exact, 2);
    norm += exact * exact;
  }
  if (norm == 0) return difference == 0 ? 0.0F : 1.0F;
  return static_cast<float>(std::sqrt(difference / norm));
}

/// The tokens that drew the most, ascending, without the document's first, which are exact anyway.
std::vector<uint32_t> choose_exact_tokens(const LayerSpec& spec,
                                          const std::vector<double>& shares) {
  std::vector<uint32_t> tokens;
  for (auto token = first_exact_rows(spec.first_token); token < shares.size(); ++token)
    tokens.push_back(token);
  const size_t count = std::min<size_t>(tokens.size(), max_chosen_exact_rows(spec.token_count));
  std::partial_sort(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(count), tokens.end(),
                    [&](uint32_t a, uint32_t b) { return shares[a] > shares[b]; });
  tokens.resize(count);
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

struct Free {
  void operator()(uint8_t* bytes) const { std::free(bytes); }
};

/// One layer, encoded as a segment of its own.
class Trial {
 public:
  static Result<Trial> encode(const LayerSpec& layer, Profile profile, const KvSource& source,
                              std::span<const uint32_t> exact_tokens) {
    SegmentSpec spec;
    spec.identity.layers = {layer.geometry};
    spec.identity.source_dtype = layer.source_dtype;
    spec.profile = profile;
    spec.first_token = layer.first_token;
    spec.token_count = layer.token_count;
    spec.digest_count = segment_digest_count(layer.first_token, layer.token_count, false);
    spec.chosen_exact_rows = static_cast<uint32_t>(exact_tokens.size());
    POLYKV_ASSIGN_OR_RETURN(const uint64_t size_bytes, segment_size_bytes(spec));
    Trial trial;
    trial.bytes_.reset(static_cast<uint8_t*>(std::aligned_alloc(kSegmentPageBytes, size_bytes)));
    if (trial.bytes_ == nullptr) {
      return {POLYKV_ERR_NO_MEMORY, format("no memory to try an encoding of %llu bytes",
                                           static_cast<unsigned long long>(size_bytes))};
    }
    // Neither ids nor digests matter to K and V.
    const std::vector<uint32_t> ids(layer.token_count);
    const std::vector<Digest> digests(spec.digest_count);
    const std::span<uint8_t> bytes(trial.bytes_.get(), size_bytes);
    POLYKV_ASSIGN_OR_RETURN(
        SegmentWriter writer,
        SegmentWriter::create(spec, {ids, Digest{}, digests, PrefixTreatment::none}, bytes));
    POLYKV_RETURN_IF_ERROR(writer.encode_layer(0, source, exact_tokens));
    POLYKV_RETURN_IF_ERROR(writer.finish());
    POLYKV_ASSIGN_OR_RETURN(trial.view_, SegmentView::open(bytes));
    return trial;
  }
  const SegmentView& view() const { return *view_; }

 private:
  std::unique_ptr<uint8_t, Free> bytes_;
  std::optional<SegmentView> view_;
};

bool can_hold(Profile profile, const LayerGeometry& geometry) {
  const Codec* codec = codec_for(profile);
  return codec != nullptr && codec->check_geometry(profile, geometry).is_ok();
}

std::vector<Profile> candidates(const LayerSpec& spec) {
  if (spec.profile != Profile::automatic) return {spec.profile};
  std::vector<Profile> profiles;
  for (const Profile profile : kAutoLadder) {
    if (can_hold(profile, spec.geometry)) profiles.push_back(profile);
  }
  return profiles;
}

}  // namespace

Result<LayerChoice> examine_layer(const LayerSpec& spec, const KvSource& source,
                                  const LayerQueries& queries) {
  const std::vector<Profile> profiles = candidates(spec);
  POLYKV_ASSIGN_OR_RETURN(Judge judge, Judge::create(spec, queries));
  const LoadChunk source_chunks = chunks_of(source, spec.geometry);
  POLYKV_ASSIGN_OR_RETURN(const std::vector<float> want, judge.attend(source_chunks));
  if (want.empty()) {
    // An encoder names the value, if it is in K or V.
    POLYKV_RETURN_IF_ERROR(Trial::encode(spec, profiles.front(), source, {}).status());
    return wrong_queries("their products with K are beyond fp32; give others, or none");
  }
  LayerChoice choice;
  const Codec* codec = codec_for(profiles.front());
  if (codec != nullptr && codec->has_exact_rows) {
    POLYKV_ASSIGN_OR_RETURN(const std::vector<double> shares, judge.shares(source_chunks));
    choice.exact_tokens = choose_exact_tokens(spec, shares);
  }
  for (const Profile profile : profiles) {
    choice.profile = profile;
    const bool has_exact_rows = profile != Profile::exact;
    POLYKV_ASSIGN_OR_RETURN(
        const Trial trial,
        Trial::encode(spec, profile, source,
                      has_exact_rows ? choice.exact_tokens : std::vector<uint32_t>()));
    POLYKV_ASSIGN_OR_RETURN(const std::vector<float> got, judge.attend(chunks_of(trial.view())));
    choice.certificate = {relative_error(got, want), queries.row_count, {}};
    if (!std::isfinite(choice.certificate.relative_error))
      return wrong_queries("weighted sums of values are beyond fp32; give no queries");
    if (choice.certificate.relative_error <= kCertificateThreshold) break;
  }
  return choice;
}

void apply_choices(std::span<const LayerChoice> choices, SegmentSpec& spec) {
  spec.has_certificate = true;
  spec.chosen_exact_rows = 0;
  spec.layer_profiles.clear();
  for (const LayerChoice& choice : choices) {
    spec.chosen_exact_rows =
        std::max(spec.chosen_exact_rows, static_cast<uint32_t>(choice.exact_tokens.size()));
    if (spec.profile == Profile::automatic) spec.layer_profiles.push_back(choice.profile);
  }
}

}  // namespace polykv
