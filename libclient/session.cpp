#include "libclient/session.h"

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "common/packet_socket.h"
#include "libclient/process.h"

namespace polykv::lib {

namespace {

// More packets than this for one request without its taking any breaks the protocol's bounds.
constexpr size_t kMaxQueuedPackets = 64;
// Giving back what nobody waited for is a courtesy: the connection's end does it as well.
constexpr int64_t kGiveBackTimeoutMs = 1'000;

Status daemon_gone() {
  return {POLYKV_ERR_DAEMON_GONE,
          "wait for polykvd: the connection has ended; see its log, then connect anew"};
}

Status status_of(const wire::Error& error) {
  const std::string message(text_or_empty(error.message()));
  const auto code = static_cast<polykv_status>(error.code());
  if (code == POLYKV_OK || code > POLYKV_ERR_WRONG_DEVICE) {
    return {POLYKV_ERR_PROTOCOL,
            format("polykvd answered with unknown status %u: %s", error.code(), message.c_str())};
  }
  return {code, message};
}

/// Events come before or after the one final reply of a request.
bool is_event(const wire::Packet& packet) {
  return packet.body_type() == wire::Body::IngestProgress ||
         packet.body_type() == wire::Body::LeaseSegments ||
         packet.body_type() == wire::Body::LeaseStalled;
}

size_t expected_fd_count(const wire::Packet& packet) {
  switch (packet.body_type()) {
    case wire::Body::LeaseSegments: {
      const auto* segments = packet.body_as_LeaseSegments()->segments();
      return segments == nullptr ? 0 : segments->size();
    }
    case wire::Body::SegmentReserved:
    case wire::Body::WorkerStart:
      return 1;
    case wire::Body::JobStart:
      return packet.body_as_JobStart()->has_before_fd() ? 2 : 1;
    default:
      return 0;
  }
}

Result<Message> to_message(ReceivedPacket received) {
  Message message;
  message.bytes = std::move(received.bytes);
  message.fds = std::move(received.fds);
  POLYKV_ASSIGN_OR_RETURN(message.packet, parse_packet(message.bytes));
  if (message.fds.size() != expected_fd_count(*message.packet)) {
    return {POLYKV_ERR_PROTOCOL, format("read a packet: %s came with %zu descriptors, not %zu",
                                        wire::EnumNameBody(message.packet->body_type()),
                                        message.fds.size(), expected_fd_count(*message.packet))};
  }
  return message;
}

}  // namespace

struct Session::Shared {
  struct Slot {
    std::deque<Message> queue;
    bool final_seen = false;
  };

  std::atomic<uint64_t> last_id{0};  // relaxed: only has to differ
  std::mutex send_mutex;             // one packet at a time waits for room in the socket

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  bool reading = false;  // a thread is in receive()
  bool closed_by_caller = false;
  bool is_worker = false;
  Status broken;  // why the connection ended; ok while it is up
  std::map<uint64_t, Slot> slots;
  std::set<uint64_t> abandoned;  // requests whose final reply nobody waits for any more

  /// Puts a packet where it belongs. Returns one that nobody wants but that grants something.
  std::optional<Message> file(Message message);
  void fail(Status status) {
    if (broken.is_ok()) broken = std::move(status);
  }
};

std::optional<Message> Session::Shared::file(Message message) try {
  const uint64_t id = message.packet->request_id();
  if (id == 0 && message.packet->body_type() == wire::Body::Error) {
    fail(status_of(*message.as<wire::Error>()));
    return std::nullopt;
  }
  if (id == 0 && !is_worker) {
    fail({POLYKV_ERR_PROTOCOL, format("read a packet: %s without a request",
                                      wire::EnumNameBody(message.packet->body_type()))});
    return std::nullopt;
  }
  const bool is_final = !is_event(*message.packet);
  const auto found = slots.find(id);
  if (found == slots.end()) {
    const bool unwanted = is_final && abandoned.erase(id) != 0;
    return unwanted ? std::optional(std::move(message)) : std::nullopt;
  }
  Slot& slot = found->second;
  slot.final_seen = slot.final_seen || is_final;
  // Only the newest progress counts, so a slow callback never makes the queue grow.
  const auto is_progress = [](const Message& m) {
    return m.packet->body_type() == wire::Body::IngestProgress;
  };
  if (is_progress(message) && !slot.queue.empty() && is_progress(slot.queue.back())) {
    slot.queue.back() = std::move(message);
    return std::nullopt;
  }
  if (slot.queue.size() >= kMaxQueuedPackets) {
    fail({POLYKV_ERR_PROTOCOL, "read a packet: polykvd sends more than was acknowledged"});
    return std::nullopt;
  }
  slot.queue.push_back(std::move(message));
  return std::nullopt;
} catch (const std::bad_alloc&) {
  fail({POLYKV_ERR_NO_MEMORY, "out of memory"});  // a lost packet would be a call that hangs
  return std::nullopt;
}

Session::Session(UniqueFd socket, bool is_worker)
    : socket_(std::move(socket)),
      generation_(process_generation()),
      shared_(std::make_unique<Shared>()) {
  shared_->is_worker = is_worker;
  if (is_worker) shared_->slots.try_emplace(0);
}

Session::~Session() {
  // In a child, a lock may be held and a condition be waited for by threads that do not exist
  // there: destroying them could hang, so a few hundred bytes are left.
  if (is_in_child()) {
    static_cast<void>(shared_.release());
  } else {
    // Not only a close: a child may hold a copy of the descriptor.
    ::shutdown(socket_.get(), SHUT_RDWR);
  }
}

void Session::close() {
  if (is_in_child()) {
    socket_.reset();  // the child's copy; a shutdown would end the parent's connection
    return;
  }
  const std::lock_guard lock(shared_->mutex);
  shared_->closed_by_caller = true;
  shared_->fail({POLYKV_ERR_DAEMON_GONE, "use a session: it was closed"});
  ::shutdown(socket_.get(), SHUT_RDWR);
  shared_->changed.notify_all();
}

bool Session::is_in_child() const {
  return process_generation() != generation_;
}

Status Session::check_process(const char* operation) const {
  return check_same_process(generation_, operation);
}

bool Session::closed_by_caller() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->closed_by_caller;
}

uint64_t Session::next_id() {
  return shared_->last_id.fetch_add(1, std::memory_order_relaxed) + 1;
}

Result<Exchange> Session::start_packet(uint64_t id, const std::vector<uint8_t>& bytes,
                                       std::span<const int> fds, Deadline deadline) {
  POLYKV_RETURN_IF_ERROR(check_process("send a request"));
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->broken.is_ok()) return shared_->broken;
    shared_->slots.try_emplace(id);
  }
  Exchange exchange(shared_from_this(), id);
  const Status sent = send_packet(bytes, fds, deadline);
  // When the daemon is gone, what it said last may still wait to be read: the reader finds out.
  if (!sent.is_ok() && sent.code() != POLYKV_ERR_DAEMON_GONE) {
    const std::lock_guard lock(shared_->mutex);
    shared_->slots[id].final_seen = true;  // no reply will come
    return sent;
  }
  return exchange;
}

Status Session::send_packet(const std::vector<uint8_t>& bytes, std::span<const int> fds,
                            Deadline deadline) {
  POLYKV_RETURN_IF_ERROR(check_process("send a packet"));
  const std::lock_guard lock(shared_->send_mutex);
  for (;;) {
    POLYKV_ASSIGN_OR_RETURN(const SocketResult result, packet_send(socket_.get(), bytes, fds));
    if (result == SocketResult::done) return Status::ok();
    if (result == SocketResult::closed) return daemon_gone();
    pollfd entry{socket_.get(), POLLOUT, 0};
    const int ready = ::poll(&entry, 1, poll_timeout_ms(deadline));
    if (ready < 0 && errno != EINTR) return system_error("wait to send a packet", errno);
    if (ready == 0) {
      return {POLYKV_ERR_TIMEOUT, "send a packet: polykvd takes no more; is it stopped?"};
    }
  }
}

Result<Message> Session::receive(Deadline deadline) try {
  for (;;) {
    pollfd entry{socket_.get(), POLLIN, 0};
    const int ready = ::poll(&entry, 1, poll_timeout_ms(deadline));
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 0) return system_error("wait for a packet", errno);
    if (ready == 0) return {POLYKV_ERR_TIMEOUT, ""};
    ReceivedPacket received;
    POLYKV_ASSIGN_OR_RETURN(SocketResult result, packet_receive(socket_.get(), received));
    if (result == SocketResult::closed) {
      // A peer that went without reading ours resets the connection, and the kernel reports that
      // before the packets it sent earlier: look again.
      POLYKV_ASSIGN_OR_RETURN(result, packet_receive(socket_.get(), received));
    }
    if (result == SocketResult::closed) return daemon_gone();
    if (result == SocketResult::done) return to_message(std::move(received));
  }
} catch (const std::bad_alloc&) {
  return {POLYKV_ERR_NO_MEMORY, "out of memory"};  // short enough to need none
}

Result<Message> Session::wait(uint64_t id, Deadline deadline) {
  POLYKV_RETURN_IF_ERROR(check_process("wait for polykvd"));
  std::unique_lock lock(shared_->mutex);
  for (;;) {
    std::deque<Message>& queue = shared_->slots[id].queue;
    if (!queue.empty()) {
      Message message = std::move(queue.front());
      queue.pop_front();
      return message;
    }
    if (!shared_->broken.is_ok()) return shared_->broken;
    if (Clock::now() >= deadline) {
      return {
          POLYKV_ERR_TIMEOUT,
          "wait for polykvd: the deadline passed without an answer; is it stopped? see its log"};
    }
    if (shared_->reading) {
      if (deadline == kNoDeadline) {
        shared_->changed.wait(lock);
      } else {
        shared_->changed.wait_until(lock, deadline);
      }
      continue;
    }
    shared_->reading = true;
    lock.unlock();
    Result<Message> received = receive(deadline);
    lock.lock();
    shared_->reading = false;
    std::optional<Message> unwanted;
    if (received.is_ok()) {
      unwanted = shared_->file(std::move(received).value());
    } else if (received.status().code() != POLYKV_ERR_TIMEOUT) {
      shared_->fail(received.status());
    }
    // A breach of the protocol ends the connection for both sides.
    if (!shared_->broken.is_ok()) ::shutdown(socket_.get(), SHUT_RDWR);
    shared_->changed.notify_all();
    if (unwanted) {
      lock.unlock();
      give_back(*unwanted);
      lock.lock();
    }
  }
}

Status Session::check_connected(const char* operation) {
  POLYKV_RETURN_IF_ERROR(check_process(operation));
  std::vector<Message> unwanted;
  Status broken;
  {
    std::unique_lock lock(shared_->mutex);
    // A thread that reads finds out by itself.
    while (shared_->broken.is_ok() && !shared_->reading) {
      shared_->reading = true;
      lock.unlock();
      Result<Message> received = receive(Clock::now());
      lock.lock();
      shared_->reading = false;
      shared_->changed.notify_all();
      if (received.is_ok()) {
        std::optional<Message> message = shared_->file(std::move(received).value());
        if (message) unwanted.push_back(std::move(*message));
      } else if (received.status().code() != POLYKV_ERR_TIMEOUT) {
        shared_->fail(received.status());
      } else {
        break;
      }
    }
    broken = shared_->broken;
  }
  if (!broken.is_ok()) return broken.with_context(operation);
  for (const Message& message : unwanted) give_back(message);
  return Status::ok();
}

Result<Message> Session::next_event(Deadline deadline) {
  assert(shared_->is_worker && "only a worker's session keeps events");
  return wait(0, deadline);
}

void Session::abandon(uint64_t id) try {
  if (is_in_child()) return;
  std::deque<Message> unread;
  {
    const std::lock_guard lock(shared_->mutex);
    const auto found = shared_->slots.find(id);
    if (found == shared_->slots.end()) return;
    if (!found->second.final_seen && shared_->broken.is_ok()) shared_->abandoned.insert(id);
    unread = std::move(found->second.queue);
    shared_->slots.erase(found);
  }
  for (const Message& message : unread) give_back(message);
} catch (const std::bad_alloc&) {
  // The connection's end gives back as well.
}

void Session::give_back(const Message& message) {
  flatbuffers::FlatBufferBuilder builder;
  const Deadline deadline = deadline_after_ms(kGiveBackTimeoutMs);
  if (const auto* lease = message.as<wire::LeaseGranted>()) {
    static_cast<void>(
        start(builder, wire::CreateRelease(builder, lease->lease()), {}, deadline).is_ok());
  } else if (const auto* ticket = message.as<wire::TicketGranted>()) {
    static_cast<void>(
        start(builder, wire::CreateTicketAbort(builder, ticket->ticket()), {}, deadline).is_ok());
  } else if (const auto* segment = message.as<wire::SegmentReserved>()) {
    static_cast<void>(
        start(builder, wire::CreateSegmentAbort(builder, segment->segment()), {}, deadline)
            .is_ok());
  }
}

Exchange::Exchange(Exchange&& other) noexcept = default;

Exchange::~Exchange() {
  if (session_ != nullptr) session_->abandon(id_);
}

Result<Message> Exchange::next(Deadline deadline) {
  POLYKV_ASSIGN_OR_RETURN(Message message, session_->wait(id_, deadline));
  if (const auto* error = message.as<wire::Error>()) return status_of(*error);
  return message;
}

Status Exchange::cancel() {
  flatbuffers::FlatBufferBuilder builder;
  const auto body = wire::CreateCancel(builder, id_);
  // Its Done is of no interest: the target's own final reply tells.
  return session_->start(builder, body).status();
}

Status unexpected_packet(const Message& message, wire::Body expected) {
  return {POLYKV_ERR_PROTOCOL,
          format("read polykvd's reply: it is %s, not %s",
                 wire::EnumNameBody(message.packet->body_type()), wire::EnumNameBody(expected))};
}

}  // namespace polykv::lib
