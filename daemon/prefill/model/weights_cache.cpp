// The weights cache file: what Weights::load made, as it lies in memory, for processes of one user
// to map.
//
//   0    magic "PKVWGHTS"            8
//   8    u32 version = 1             4
//   12   u32 tied output (0, 1)      4
//   16   u64 value count             8
//   24   u64 XXH3-64 of the values   8
//   32   configuration digest       32
//   64   model fingerprint          32
//   96   zero, up to 4,096
//   4096 value count floats, at the offsets of weights_layout()
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "common/fd.h"
#include "daemon/prefill/model/fingerprint.h"
#include "daemon/prefill/model/weights.h"

namespace polykv {

namespace {

constexpr std::array<char, 8> kMagic = {'P', 'K', 'V', 'W', 'G', 'H', 'T', 'S'};
constexpr uint32_t kVersion = 1;
constexpr size_t kHeaderBytes = 4096;  // the values begin at a page

struct Header {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t tied_output;
  uint64_t value_count;
  uint64_t checksum;
  Digest config;
  Digest fingerprint;
};
static_assert(sizeof(Header) == 96 && offsetof(Header, config) == 32 &&
              std::has_unique_object_representations_v<Header>);

Status write_all(int fd, const void* data, uint64_t size_bytes, const std::string& path) {
  const auto* bytes = static_cast<const char*>(data);
  while (size_bytes > 0) {
    const ssize_t count = write(fd, bytes, std::min<uint64_t>(size_bytes, uint64_t{256} << 20));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      return system_error("write weights cache " + quoted(path), errno,
                          "free space or choose another folder");
    }
    bytes += count;
    size_bytes -= static_cast<uint64_t>(count);
  }
  return Status::ok();
}

/// A cache, of whatever model and version, or an empty file; never somebody's document.
Status may_be_replaced(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (fd.get() < 0 && errno == ENOENT) return Status::ok();
  const auto refuse = [&](const char* cause) {
    return Status(POLYKV_ERR_ALREADY_EXISTS, "write weights cache " + quoted(path) + ": " + cause +
                                                 "; choose another path, or remove it");
  };
  if (fd.get() < 0) return refuse("what is there cannot be read");
  decltype(Header::magic) magic{};
  const ssize_t got = pread(fd.get(), &magic, sizeof magic, 0);
  if (got == 0 || (got == static_cast<ssize_t>(sizeof magic) && magic == kMagic))
    return Status::ok();
  return refuse("a file that is no weights cache is there");
}

}  // namespace

Status Weights::save_cache(const std::string& path) const {
  POLYKV_RETURN_IF_ERROR(may_be_replaced(path));
  const std::string temporary = path + format(".%ld.tmp", static_cast<long>(getpid()));
  unlink(temporary.c_str());
  const UniqueFd fd(
      open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (fd.get() < 0) {
    return system_error("create weights cache " + quoted(temporary), errno,
                        "choose a folder of your own");
  }
  const uint64_t value_bytes = layout_.value_count * sizeof(float);
  Header header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.tied_output = tied_output_ ? 1 : 0;
  header.value_count = layout_.value_count;
  header.checksum = XXH3_64bits(data_, value_bytes);
  header.config = config_digest(config_);
  header.fingerprint = fingerprint_;
  std::array<char, kHeaderBytes> page{};
  std::memcpy(page.data(), &header, sizeof header);
  Status status = write_all(fd.get(), page.data(), page.size(), temporary);
  if (status.is_ok()) status = write_all(fd.get(), data_, value_bytes, temporary);
  if (status.is_ok() && fsync(fd.get()) != 0) {
    status = system_error("write weights cache " + quoted(temporary), errno);
  }
  if (status.is_ok() && rename(temporary.c_str(), path.c_str()) != 0) {
    status = system_error("rename weights cache to " + quoted(path), errno);
  }
  if (!status.is_ok()) unlink(temporary.c_str());
  return status;
}

Result<Weights> Weights::open_cache(const std::string& path, const ModelConfig& config,
                                    bool verify) {
  const auto refuse = [&](polykv_status code, const char* cause) {
    return Status(code, "open weights cache " + quoted(path) + ": " + cause +
                            "; remove it and make it again");
  };
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (fd.get() < 0 && errno == ENOENT) {
    return {POLYKV_ERR_NOT_FOUND,
            "open weights cache " + quoted(path) + ": there is none; load the model and save it"};
  }
  if (fd.get() < 0) return system_error("open weights cache " + quoted(path), errno);
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return system_error("open weights cache " + quoted(path), errno);
  if (!S_ISREG(info.st_mode)) return refuse(POLYKV_ERR_CORRUPT, "not a regular file");
  if (info.st_uid != geteuid() || (info.st_mode & 077) != 0) {
    return refuse(POLYKV_ERR_PERMISSION, "it is not a private file of this user (mode 0600)");
  }
  Header header{};
  if (pread(fd.get(), &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header) ||
      header.magic != kMagic) {
    return refuse(POLYKV_ERR_CORRUPT, "it is no weights cache");
  }
  if (header.version != kVersion) return refuse(POLYKV_ERR_CORRUPT, "it has another version");
  if (header.config != config_digest(config) || header.tied_output > 1) {
    return refuse(POLYKV_ERR_CORRUPT, "it belongs to another model");
  }
  Weights weights;
  weights.config_ = config;
  weights.tied_output_ = header.tied_output == 1;
  weights.layout_ = weights_layout(config, weights.tied_output_);
  weights.fingerprint_ = header.fingerprint;
  const uint64_t value_bytes = weights.layout_.value_count * sizeof(float);
  const uint64_t file_bytes = kHeaderBytes + value_bytes;
  if (header.value_count != weights.layout_.value_count ||
      static_cast<uint64_t>(info.st_size) != file_bytes) {
    return refuse(POLYKV_ERR_CORRUPT, "its size does not fit the model");
  }
  void* base = mmap(nullptr, file_bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return system_error("map weights cache " + quoted(path), errno);
  weights.region_ =
      std::shared_ptr<void>(base, [file_bytes](void* mapped) { munmap(mapped, file_bytes); });
  weights.data_ = reinterpret_cast<const float*>(static_cast<const char*>(base) + kHeaderBytes);
  if (verify && XXH3_64bits(weights.data_, value_bytes) != header.checksum) {
    return refuse(POLYKV_ERR_CORRUPT, "its checksum is wrong");
  }
  return weights;
}

}  // namespace polykv
