// Which model a file holds, remembered by what fstat says about it: agents never hash, and a worker
// hashes a file once. One thread.
#pragma once

#include <cstdint>
#include <map>

#include "common/result.h"
#include "include/internal/geometry.h"

namespace polykv::daemon {

/// One state of one file. A changed file differs at least in its change time, which no user can
/// set.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t size_bytes = 0;
  int64_t modified_ns = 0;
  int64_t changed_ns = 0;
  // NOLINTNEXTLINE(modernize-use-nullptr): it takes the comparison's 0 for a pointer
  auto operator<=>(const FileIdentity&) const = default;
};
/// Of a regular file or memfd; ERR_INVALID_ARGUMENT otherwise.
Result<FileIdentity> file_identity(int fd);

/// A model file as one domain sees it: what one user's worker says is believed for that user alone.
struct ModelKey {
  uint32_t uid = 0;
  FileIdentity file;
  // NOLINTNEXTLINE(modernize-use-nullptr)
  auto operator<=>(const ModelKey&) const = default;
};

class FingerprintCache {
 public:
  explicit FingerprintCache(size_t capacity = 256) : capacity_(capacity) {}

  /// Null: unknown. Valid until the next insert().
  const ModelIdentity* find(const ModelKey& key);
  void insert(const ModelKey& key, ModelIdentity identity);

 private:
  struct Entry {
    ModelIdentity identity;
    uint64_t last_use = 0;
  };

  size_t capacity_;
  std::map<ModelKey, Entry> entries_;
  uint64_t use_count_ = 0;
};

}  // namespace polykv::daemon
