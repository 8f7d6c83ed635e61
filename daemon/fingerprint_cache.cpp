#include "daemon/fingerprint_cache.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

namespace polykv::daemon {

Result<FileIdentity> file_identity(int fd) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return system_error("look at a model file", errno);
  if (!S_ISREG(info.st_mode)) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "look at a model file: it is no regular file; give a GGUF file"};
  }
  const auto nanoseconds = [](const timespec& time) {
    return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
  };
  return FileIdentity{info.st_dev, info.st_ino, static_cast<uint64_t>(info.st_size),
                      nanoseconds(info.st_mtim), nanoseconds(info.st_ctim)};
}

const ModelIdentity* FingerprintCache::find(const ModelKey& key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return nullptr;
  found->second.last_use = ++use_count_;
  return &found->second.identity;
}

void FingerprintCache::insert(const ModelKey& key, ModelIdentity identity) {
  entries_[key] = {std::move(identity), ++use_count_};
  if (entries_.size() <= capacity_) return;
  const auto by_use = [](const auto& a, const auto& b) {
    return a.second.last_use < b.second.last_use;
  };
  entries_.erase(std::min_element(entries_.begin(), entries_.end(), by_use));
}

}  // namespace polykv::daemon
