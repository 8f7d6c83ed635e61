// Mapping: the one owner of a shared mapping of a descriptor, by Boost.Interprocess over our own
// mapping handle. The descriptor may be closed afterwards. Move-only; unmapped by the destructor.
#pragma once

#include <boost/interprocess/mapped_region.hpp>
#include <cstdint>
#include <span>

#include "common/result.h"

namespace polykv {

enum class MapAccess { read_only, read_write };

class Mapping {
 public:
  Mapping() = default;
  /// Maps the first size_bytes (> 0) of fd, shared. ERR_SYSTEM names the limit that was hit
  /// (max_map_count, address space).
  static Result<Mapping> map(int fd, uint64_t size_bytes, MapAccess access);

  bool is_mapped() const { return region_.get_size() != 0; }
  std::span<const uint8_t> bytes() const {
    return {static_cast<const uint8_t*>(region_.get_address()), region_.get_size()};
  }
  /// Only of a read_write mapping.
  std::span<uint8_t> writable_bytes() const {
    return {static_cast<uint8_t*>(region_.get_address()), region_.get_size()};
  }
  void reset() { region_ = boost::interprocess::mapped_region(); }
  /// In a child of fork that did not get it (see keep_from_children): what is at its address now is somebody else's.
  void forget() noexcept;

 private:
  boost::interprocess::mapped_region region_;
};

/// Children that this process forks from now on do not get these pages (whole ones). A child's copy of a writable
/// mapping would keep its file from being sealed for as long as the child lives.
Status keep_from_children(std::span<const uint8_t> bytes);

}  // namespace polykv
