// A model with keys that are hard to encode: biases as Qwen2 has them, and a sink in the middle of a
// text.
//
// One pair of channels of each kv_head, which RoPE turns about once in 200 tokens so that no mean
// takes it away, gets an offset of `factor` times the standard deviation of the window's first keys.
// Queries have as many times less in that pair, so that the offset moves logits by what ordinary
// keys do, and the model still works; it has lost one pair of 2 / head_dim. A third of the layers is so, a third
// has a tenth of the factor, and a third is left alone. The token in the middle gets K and V of the
// text's first token, to which much of the attention goes.
//
// It is another model, and compared with itself: it computes its uncompressed cache so, and reads
// decoded ones so.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/prefill/transformer/transformer.h"

namespace polykv::eval {

class HostileKeys {
 public:
  /// `sink_position`: of the token in the middle.
  HostileKeys(const ModelConfig& config, double factor, uint32_t sink_position);
  /// For ForwardOptions::before_rope. Rows at position 0 begin a text.
  void change(const LayerRows& rows);

 private:
  void begin(const LayerRows& rows);
  /// Of a layer; 0: it is left alone.
  float factor(uint32_t layer) const;

  ModelConfig config_;
  double factor_;
  uint32_t sink_position_;
  uint32_t pair_;               // its channels are this one and this + head_dim / 2
  size_t kv_floats_;            // of a row
  std::vector<float> offsets_;  // [layer, kv_head, head_dim]
  std::vector<float> first_k_;  // [layer, kv_head, head_dim]: of the text's first token
  std::vector<float> first_v_;
};

}  // namespace polykv::eval
