// Handles that a client holds: {epoch, slot, generation}. A stale one is an error, never another
// object.
#pragma once

#include <cassert>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/result.h"
#include "common/wire.h"

namespace polykv::daemon {

/// What a handle names; part of the slot number, so that a ticket can never pass for a lease.
enum class HandleKind : uint32_t { lease = 1, ticket = 2, segment = 3 };
const char* handle_kind_name(HandleKind kind);

struct Handle {
  uint64_t epoch = 0;  // of the daemon's boot
  uint32_t slot = 0;   // kind in the upper two bits
  uint32_t generation = 0;
  bool operator==(const Handle&) const = default;
};

using polykv::from_wire;
using polykv::to_wire;
inline wire::Handle to_wire(const Handle& handle) {
  return {handle.epoch, handle.slot, handle.generation};
}
inline Handle from_wire(const wire::Handle& handle) {
  return {handle.epoch(), handle.slot(), handle.generation()};
}

/// Owns objects of one kind. A slot is used again with the next generation; one whose generations
/// are used up stays empty.
template <typename T>
class HandleTable {
 public:
  HandleTable(HandleKind kind, uint64_t epoch) : kind_(kind), epoch_(epoch) {}

  Handle insert(std::shared_ptr<T> object) {
    assert(object != nullptr);
    uint32_t index = 0;
    if (free_.empty()) {
      index = static_cast<uint32_t>(slots_.size());
      assert(index < kIndexLimit && "bounded by the limits on sessions");
      slots_.emplace_back();
    } else {
      index = free_.back();
      free_.pop_back();
    }
    slots_[index].object = std::move(object);
    ++live_count_;
    return {epoch_, static_cast<uint32_t>(kind_) << kKindShift | index, slots_[index].generation};
  }

  /// Null: stale, or never given out.
  std::shared_ptr<T> find(const Handle& handle) const {
    const uint32_t index = handle.slot & (kIndexLimit - 1);
    if (handle.epoch != epoch_ || handle.slot >> kKindShift != static_cast<uint32_t>(kind_) ||
        index >= slots_.size() || slots_[index].generation != handle.generation) {
      return nullptr;
    }
    return slots_[index].object;
  }

  /// Why find() answered null, for the client: POLYKV_ERR_STALE.
  Status stale(const char* operation, const Handle& handle) const {
    const char* kind = handle_kind_name(kind_);
    return {POLYKV_ERR_STALE,
            handle.epoch != epoch_
                ? format("%s: the %s is of an earlier polykvd; connect and acquire again",
                         operation, kind)
                : format("%s: the %s has ended or is not of this connection; acquire again",
                         operation, kind)};
  }

  /// The handle's object must be there.
  void erase(const Handle& handle) {
    assert(find(handle) != nullptr);
    const uint32_t index = handle.slot & (kIndexLimit - 1);
    slots_[index].object = nullptr;
    --live_count_;
    if (++slots_[index].generation != 0) free_.push_back(index);
  }

  size_t live_count() const { return live_count_; }

 private:
  static constexpr uint32_t kKindShift = 30;
  static constexpr uint32_t kIndexLimit = uint32_t{1} << kKindShift;

  struct Slot {
    std::shared_ptr<T> object;
    uint32_t generation = 1;
  };

  HandleKind kind_;
  uint64_t epoch_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  size_t live_count_ = 0;
};

}  // namespace polykv::daemon
