#include "daemon/segments.h"

#include <cassert>

namespace polykv::daemon {

std::shared_ptr<Segment> Segments::reserve(uint64_t first_token, uint64_t token_count,
                                           uint64_t size_bytes, uint64_t charged_bytes) {
  auto segment = std::make_shared<Segment>();
  segment->first_token = first_token;
  segment->token_count = token_count;
  segment->size_bytes = size_bytes;
  segment->charged_bytes = charged_bytes == 0 ? size_bytes : charged_bytes;
  stored_bytes_ += segment->charged_bytes;
  unallocated_bytes_ += segment->charged_bytes;
  ++segment_count_;
  return segment;
}

void Segments::fill(Segment& segment, std::shared_ptr<const UniqueFd> writable,
                    SharedDeviceMemory device) {
  assert(segment.state == SegmentState::reserved);
  segment.state = SegmentState::filling;
  segment.writable = std::move(writable);
  segment.device = std::move(device);
  unallocated_bytes_ -= segment.charged_bytes;
}

void Segments::seal(Segment& segment, UniqueFd readable) {
  assert(segment.state == SegmentState::filling);
  segment.state = SegmentState::sealed;
  segment.writable.reset();
  segment.readable = std::make_shared<const UniqueFd>(std::move(readable));
}

void Segments::retire(Segment& segment) {
  assert(segment.state < SegmentState::retiring);
  if (segment.state == SegmentState::reserved) unallocated_bytes_ -= segment.charged_bytes;
  segment.state = SegmentState::retiring;
  stored_bytes_ -= segment.charged_bytes;
  retiring_bytes_ += segment.charged_bytes;
  if (segment.holder_count == 0) end(segment);
}

void Segments::end(Segment& segment) {
  assert(segment.state == SegmentState::retiring && segment.holder_count == 0);
  segment.state = SegmentState::gone;
  segment.writable.reset();
  segment.readable.reset();
  segment.device.reset();
  retiring_bytes_ -= segment.charged_bytes;
  --segment_count_;
}

void Segments::hold(Process& process, const std::shared_ptr<Segment>& segment) {
  assert(!process.is_gone && segment->state != SegmentState::gone);
  Process::Holding& holding = process.holdings[segment.get()];
  if (holding.count++ == 0) {
    holding.segment = segment;
    ++segment->holder_count;
  }
}

void Segments::release(Process& process, const Segment& segment) {
  const auto found = process.holdings.find(&segment);
  // A process that is gone has let go of everything before its connections' leases end.
  if (found == process.holdings.end()) return;
  if (--found->second.count > 0) return;
  const std::shared_ptr<Segment> held = std::move(found->second.segment);
  process.holdings.erase(found);
  drop_holder(*held);
}

void Segments::release_all(Process& process) {
  auto holdings = std::move(process.holdings);
  process.holdings.clear();
  for (auto& [key, holding] : holdings) drop_holder(*holding.segment);
}

void Segments::drop_holder(Segment& segment) {
  assert(segment.holder_count > 0);
  if (--segment.holder_count == 0 && segment.state == SegmentState::retiring) end(segment);
}

}  // namespace polykv::daemon
