// Connections: accept, identity, handshake, packets in and out. Knows nothing of documents.
#pragma once

#include <sys/types.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/packet_socket.h"
#include "common/wire.h"
#include "daemon/event_loop.h"
#include "daemon/limits.h"
#include "daemon/message_rules.h"
#include "daemon/peer_identity.h"
#include "daemon/processes.h"

namespace polykv::daemon {

using SessionId = uint64_t;  // never used again; 0: none
using SharedFd = std::shared_ptr<const UniqueFd>;

/// One connection. Fields are the server's to change; others read them.
struct Session {
  SessionId id = 0;
  SessionKind kind = SessionKind::client;
  uid_t uid = 0;                     // its domain; of a worker: the daemon's own
  std::shared_ptr<Process> process;  // from the handshake on
  std::string client_name;
  bool is_ready = false;  // the handshake is done

  struct Output {
    std::vector<uint8_t> bytes;
    std::vector<SharedFd> fds;
  };
  UniqueFd socket;
  PeerCredentials credentials;
  uint32_t protocol_version = 0;
  uint32_t protocol_version_min = 0;
  std::deque<Output> output;
  size_t output_bytes = 0;
  EventLoop::TimerId handshake_timer = 0;
  bool is_ending = false;
};

/// Who acts on what sessions say. Packets have passed check_message.
class SessionHandler {
 public:
  virtual ~SessionHandler() = default;
  virtual void on_session_ready(Session& session) = 0;
  virtual void on_packet(Session& session, const wire::Packet& packet,
                         std::vector<UniqueFd> fds) = 0;
  /// Once for each session that was ready. It cannot be sent to any more.
  virtual void on_session_end(Session& session) = 0;
};

/// For the loop's thread.
class Server {
 public:
  struct Identity {
    uint64_t epoch = 0;
    std::string version;
    bool use_peer_pidfd = true;  // false: as on kernels before 6.5
    std::string backing = "memfd";
    uint32_t device_driver = 0;  // CUDA versions, see Welcome
    uint32_t device_runtime = 0;
  };

  Server(EventLoop& loop, const Limits& limits, Processes& processes, Identity identity);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Once, before the first session.
  void set_handler(SessionHandler& handler) { handler_ = &handler; }
  /// Accepts from a listening socket until stop().
  Status listen(UniqueFd listening_socket);
  /// The daemon's end of a worker's socket pair. The worker still says Hello.
  Result<SessionId> adopt_worker(UniqueFd socket, pid_t pid, UniqueFd pidfd);
  /// Ends every session, without replies; with a failing reason as drop() does.
  void stop(const Status& reason = Status::ok());

  /// Null: it has ended.
  Session* find(SessionId id);
  size_t session_count() const { return sessions_.size(); }

  /// Sends now or queues; a session whose queue is full is dropped. A session that has ended is
  /// fine.
  void send(SessionId id, std::vector<uint8_t> packet, std::vector<SharedFd> fds = {});
  void reply_error(SessionId id, uint64_t request_id, const Status& error);
  void reply_done(SessionId id, uint64_t request_id);
  /// Ends a session for the given reason, with a last Error packet if that can be sent at once.
  void drop(SessionId id, const Status& reason);
  /// Ends a session without a word. One that has ended is fine.
  void close(SessionId id);
  /// Ends all sessions of a process that is gone.
  void end_sessions_of(const Process& process);

 private:
  void accept_some();
  void accept_one(UniqueFd socket);
  void shed_connection(int why);
  Status admit(const PeerCredentials& credentials) const;
  Result<Session*> add_session(UniqueFd socket, SessionKind kind, const PeerCredentials& peer);
  void on_socket(SessionId id, uint32_t events);
  void receive_some(Session& session);
  void on_bytes(Session& session, ReceivedPacket packet);
  Status shake_hands(Session& session, const wire::Packet& packet, std::vector<UniqueFd>& fds);
  void flush(Session& session);
  void end(Session& session, const char* why);
  void finish_end(SessionId id);

  EventLoop& loop_;
  const Limits& limits_;
  Processes& processes_;
  Identity identity_;
  SessionHandler* handler_ = nullptr;
  UniqueFd listening_;
  UniqueFd spare_;  // given up for a moment to shed a connection when there are no descriptors
  SessionId next_id_ = 1;
  std::map<SessionId, std::unique_ptr<Session>> sessions_;
  std::map<uid_t, size_t> sessions_of_user_;  // clients
};

/// Finishes a packet whose last table is `body`, and queues it.
template <typename Table>
void send_packet(Server& server, SessionId id, flatbuffers::FlatBufferBuilder& builder,
                 uint64_t request_id, flatbuffers::Offset<Table> body,
                 // NOLINTNEXTLINE(performance-unnecessary-value-param): it is moved
                 std::vector<SharedFd> fds = {}) {
  server.send(id, make_packet(builder, request_id, body), std::move(fds));
}

}  // namespace polykv::daemon
