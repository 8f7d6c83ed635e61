// Digests: the chain that says *what* a document is, independent of names, profiles and of where
// segments end.
//
//   root = BLAKE2b-256("polykv root 1", fingerprint, dtype, RoPE parameters, geometry of each layer)
//   d[0] = BLAKE2b-256("polykv chunk 1", root,   ids 0 .. 255)
//   d[i] = BLAKE2b-256("polykv chunk 1", d[i-1], ids 256*i .. 256*i+255)
//   tail = BLAKE2b-256("polykv tail 1",  d[n-1], count, the last count ids)
//          only when the document ends with count < 256 ids
//
// ids enter as little-endian uint32. Equal prefixes have equal chains; a short tail never equals a
// full chunk. Functions are pure and thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "include/internal/geometry.h"

namespace polykv {

inline constexpr uint32_t kChunkTokens = 256;

Digest chain_root(const ModelIdentity& identity);

/// Digest of the next chunk after `parent`: a full chunk if ids.size() == kChunkTokens, a tail if
/// shorter (1..255 ids).
Digest chain_next(const Digest& parent, std::span<const uint32_t> ids);

/// All digests of a document, in order: ceil(ids.size() / 256) of them; the last one identifies the
/// document. No ids: empty.
std::vector<Digest> chain_digests(const Digest& root, std::span<const uint32_t> ids);

/// BLAKE2b-256 over bytes given piece by piece.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(Hasher&&) noexcept;
  Hasher& operator=(Hasher&&) noexcept;
  Hasher& update(std::span<const uint8_t> bytes);
  Hasher& update(
      std::string_view text);  // length first, so that neighbouring texts cannot run together
  Hasher& update_u32(uint32_t value);  // little-endian
  Hasher& update_u64(uint64_t value);  // little-endian
  Hasher& update_f64(double value);    // IEEE 754 bits, little-endian
  Digest finish();                     // once; the Hasher is empty afterwards

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace polykv
