#include "common/mapping.h"

#include <sys/mman.h>

#include <boost/interprocess/exceptions.hpp>
#include <cerrno>
#include <cstddef>
#include <new>

namespace polykv {

namespace {
/// What mapped_region asks of a "memory mappable": a descriptor that stays ours.
class DescriptorHandle {
 public:
  explicit DescriptorHandle(int fd) : fd_(fd) {}
  boost::interprocess::mapping_handle_t get_mapping_handle() const { return {fd_, false}; }

 private:
  int fd_;
};
}  // namespace

Result<Mapping> Mapping::map(int fd, uint64_t size_bytes, MapAccess access) {
  assert(size_bytes > 0);
  try {
    Mapping mapping;
    mapping.region_ = boost::interprocess::mapped_region(DescriptorHandle(fd),
                                                         access == MapAccess::read_only
                                                             ? boost::interprocess::read_only
                                                             : boost::interprocess::read_write,
                                                         0, size_bytes);
    return mapping;
  } catch (const boost::interprocess::interprocess_exception& error) {
    return system_error(format("map %llu bytes", static_cast<unsigned long long>(size_bytes)),
                        error.get_native_error(),
                        "see vm.max_map_count, RLIMIT_AS and free memory");
  }
}

void Mapping::forget() noexcept {
  alignas(boost::interprocess::mapped_region)
      std::byte never_destroyed[sizeof(boost::interprocess::mapped_region)];
  new (never_destroyed) boost::interprocess::mapped_region(std::move(region_));
}

Status keep_from_children(std::span<const uint8_t> bytes) {
  if (::madvise(const_cast<uint8_t*>(bytes.data()), bytes.size(), MADV_DONTFORK) == 0)
    return Status::ok();
  return system_error("keep memory from forked children", errno, "see vm.max_map_count");
}

}  // namespace polykv
