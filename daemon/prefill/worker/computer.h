// Where this worker computes documents: on the processor (host_computer.h) or on a GPU (gpu_computer.h). One is chosen
// when the worker starts, for good.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "common/result.h"
#include "daemon/prefill/model/weights.h"
#include "daemon/prefill/transformer/forward.h"
#include "libclient/lease.h"
#include "libclient/publisher.h"

namespace polykv {

/// Tokens that go through a layer together, between two signs of life.
inline constexpr uint32_t kPrefillChunkTokens = 512;

/// What memory follows from.
struct DocumentSize {
  const ModelConfig& config;
  bool tied_output = false;
  uint32_t token_count = 0;
  uint32_t segment_tokens = 0;  // of the largest segment
};

/// K and V of one document while they are being computed. One thread.
class Computation {
 public:
  virtual ~Computation() = default;

  /// Tokens that are there, from the document's first on.
  virtual uint32_t token_count() const = 0;
  /// For a document whose beginning was sealed already: what one layer of its first tokens decodes to.
  virtual Status take_layer(const lib::Lease& sealed, uint32_t layer, uint32_t token_count) = 0;
  /// Once all layers were taken.
  virtual void set_token_count(uint32_t token_count) = 0;
  /// Computes the tokens that follow. Of `options` progress, between_layers and chunk_tokens.
  virtual Status forward(std::span<const uint32_t> ids, ForwardOptions options) = 0;
  /// Seals the publisher's next token_count tokens, which are there and the last that are: examined, encoded, committed.
  virtual Status publish(lib::Publisher& publisher, uint64_t token_count) = 0;
};

class Computer {
 public:
  virtual ~Computer() = default;

  /// For the log: "the processor, OpenBLAS ...".
  virtual const std::string& description() const = 0;
  virtual bool has_weights() const = 0;
  /// `progress` is called now and then, and ends it (POLYKV_ERR_CANCELLED) by returning false.
  virtual Status take_weights(Weights weights, const Weights::Progress& progress) = 0;
  /// Whether take_layer() can be had: the processor's worker has no GPU in its sandbox. Otherwise what is sealed is computed
  /// again, and not stored again.
  virtual bool reads_sealed() const = 0;
  /// What computing a document takes of the host's memory in all; weights_bytes counts as there once has_weights().
  virtual MemoryEstimate host_memory(const DocumentSize& size) const = 0;
  /// Whether there is enough of other memory: POLYKV_ERR_BUDGET tells needed and free.
  virtual Status check_other_memory(const DocumentSize& size) const = 0;
  /// After take_weights(). The computation may use what it is given by no other at the same time.
  virtual Result<std::unique_ptr<Computation>> begin(uint32_t token_count) = 0;
};

}  // namespace polykv
