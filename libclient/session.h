// Session: one connection to polykvd, used by any number of threads.
//
// Nobody owns a receiving thread: of the threads that wait for a reply, one reads the socket for
// all and hands the packets out by request id; when its own reply is there, another takes over.
// Replies may come in any order. A hang-up answers every wait with POLYKV_ERR_DAEMON_GONE.
//
// After fork() the child may only destroy or close: that closes its copies of descriptors and
// frees memory, and never touches the connection or a lock that another thread of the parent held.
#pragma once

#include <flatbuffers/flatbuffers.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/fd.h"
#include "common/result.h"
#include "common/wire.h"
#include "libclient/deadline.h"

namespace polykv::lib {

/// How long a request that the daemon answers at once may take.
inline constexpr int64_t kReplyTimeoutMs = 60'000;

struct ConnectOptions {
  std::string socket_path;  // empty: POLYKV_SOCKET, else the usual places in turn
  std::string client_name;  // empty: the program's name
  int64_t timeout_ms = 10'000;
};

/// A received packet: `packet` points into `bytes`. The number of descriptors is what the protocol
/// says for its type.
struct Message {
  std::vector<uint8_t> bytes;
  std::vector<UniqueFd> fds;
  const wire::Packet* packet = nullptr;

  template <typename Table>
  const Table* as() const {
    return packet->body_as<Table>();
  }
};

class Session;

/// One request under way. Move-only, for one thread. Destroyed before its final reply came, it
/// leaves word to give back whatever the late reply grants.
class Exchange {
 public:
  Exchange(Exchange&& other) noexcept;
  Exchange& operator=(Exchange&&) = delete;
  ~Exchange();

  /// The next packet of this request. An Error packet is a failing Status of its code and message.
  Result<Message> next(Deadline deadline);
  /// The same, and POLYKV_ERR_PROTOCOL unless it is a Table.
  template <typename Table>
  Result<Message> next_as(Deadline deadline);
  /// Asks the daemon to give up a waiting Acquire or Ingest; its final reply still has to be taken.
  Status cancel();
  uint64_t id() const { return id_; }

 private:
  friend class Session;
  Exchange(std::shared_ptr<Session> session, uint64_t id) : session_(std::move(session)), id_(id) {}

  std::shared_ptr<Session> session_;
  uint64_t id_ = 0;
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  /// Finds the socket, connects and shakes hands.
  static Result<std::shared_ptr<Session>> connect(const ConnectOptions& options);
  /// Shakes hands on a connected socket. A worker's session keeps packets of request id 0 for
  /// next_event(); any other treats them as a breach of the protocol.
  static Result<std::shared_ptr<Session>> adopt(UniqueFd socket, const std::string& client_name,
                                                Deadline deadline, bool is_worker = false);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// Ends the connection: calls that wait, and later ones, answer POLYKV_ERR_DAEMON_GONE.
  void close();

  /// Sends a request whose last table in `builder` is `body`.
  template <typename Table>
  Result<Exchange> start(flatbuffers::FlatBufferBuilder& builder, flatbuffers::Offset<Table> body,
                         std::span<const int> fds = {},
                         Deadline deadline = deadline_after_ms(kReplyTimeoutMs)) {
    const uint64_t id = next_id();
    return start_packet(id, make_packet(builder, id, body), fds, deadline);
  }

  /// start() and its single reply, which must be a Reply.
  template <typename Reply, typename Table>
  Result<Message> call(flatbuffers::FlatBufferBuilder& builder, flatbuffers::Offset<Table> body,
                       std::span<const int> fds = {},
                       Deadline deadline = deadline_after_ms(kReplyTimeoutMs)) {
    POLYKV_ASSIGN_OR_RETURN(Exchange exchange, start(builder, body, fds, deadline));
    return exchange.next_as<Reply>(deadline);
  }

  /// Sends a packet that has no reply.
  template <typename Table>
  Status send(flatbuffers::FlatBufferBuilder& builder, flatbuffers::Offset<Table> body,
              Deadline deadline = deadline_after_ms(kReplyTimeoutMs)) {
    return send_packet(make_packet(builder, next_id(), body), {}, deadline);
  }

  /// The next packet of request id 0; sessions of a worker only.
  Result<Message> next_event(Deadline deadline);

  /// POLYKV_ERR_FORKED in a child of the process that made the session.
  Status check_process(const char* operation) const;
  bool is_in_child() const;
  bool closed_by_caller() const;
  /// Whether polykvd still serves this session, as far as it has told us: takes what has arrived and
  /// waits for nothing. Otherwise why not.
  Status check_connected(const char* operation);
  uint64_t epoch() const { return epoch_; }
  uint64_t stall_deadline_ms() const { return stall_deadline_ms_; }
  const std::string& daemon_version() const { return daemon_version_; }
  /// Of a daemon whose documents are in device memory: the CUDA version of its driver; else 0.
  uint32_t device_driver() const { return device_driver_; }

 private:
  friend class Exchange;
  struct Shared;

  Session(UniqueFd socket, bool is_worker);
  Status shake_hands(const std::string& client_name, Deadline deadline);
  uint64_t next_id();
  Result<Exchange> start_packet(uint64_t id, const std::vector<uint8_t>& bytes,
                                std::span<const int> fds, Deadline deadline);
  Status send_packet(const std::vector<uint8_t>& bytes, std::span<const int> fds,
                     Deadline deadline);
  Result<Message> wait(uint64_t id, Deadline deadline);
  Result<Message> receive(Deadline deadline);
  void dispatch(Result<Message> received);
  void abandon(uint64_t id);
  void give_back(const Message& message);
  void break_off(Status status);

  UniqueFd socket_;
  const uint64_t generation_;
  std::unique_ptr<Shared> shared_;
  uint64_t epoch_ = 0;
  uint64_t stall_deadline_ms_ = 0;
  std::string daemon_version_;
  uint32_t device_driver_ = 0;
};

/// POLYKV_ERR_PROTOCOL: the daemon answered with something else than was asked for.
Status unexpected_packet(const Message& message, wire::Body expected);

template <typename Table>
Result<Message> Exchange::next_as(Deadline deadline) {
  POLYKV_ASSIGN_OR_RETURN(Message message, next(deadline));
  if (message.as<Table>() == nullptr) {
    return unexpected_packet(message, wire::BodyTraits<Table>::enum_value);
  }
  return message;
}

/// Where a client looks for the daemon: {path} of POLYKV_SOCKET, or the usual places in order.
std::vector<std::string> default_socket_paths();

}  // namespace polykv::lib
