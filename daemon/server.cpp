#include "daemon/server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "daemon/log.h"

namespace polykv::daemon {

namespace {
constexpr int64_t kAcceptPauseMs = 100;  // when even the spare descriptor did not help
constexpr int kAcceptsPerEvent = 16;

std::vector<uint8_t> error_packet(uint64_t request_id, const Status& error) {
  flatbuffers::FlatBufferBuilder builder;
  const auto body = wire::CreateErrorDirect(builder, static_cast<uint32_t>(error.code()),
                                            error.message().c_str());
  return make_packet(builder, request_id, body);
}

/// Text of a peer for logs and messages: no control character, so that it cannot forge a line.
std::string printable(std::string_view text, size_t size_max) {
  std::string result(text.substr(0, size_max));
  for (char& c : result) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return result;
}

UniqueFd open_spare() {
  return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}
}  // namespace

Server::Server(EventLoop& loop, const Limits& limits, Processes& processes, Identity identity)
    : loop_(loop),
      limits_(limits),
      processes_(processes),
      identity_(std::move(identity)),
      spare_(open_spare()) {}

Server::~Server() {
  if (listening_) loop_.unwatch(listening_.get());
  for (auto& [id, session] : sessions_) loop_.unwatch(session->socket.get());
}

Status Server::listen(UniqueFd listening_socket) {
  POLYKV_RETURN_IF_ERROR(set_nonblocking(listening_socket.get(), true));
  listening_ = std::move(listening_socket);
  return loop_.watch(listening_.get(), EPOLLIN, [this](uint32_t) { accept_some(); });
}

void Server::stop(const Status& reason) {
  if (listening_) loop_.unwatch(listening_.get());
  listening_.reset();
  for (auto& [id, session] : sessions_) {
    if (session->is_ending) continue;
    if (reason.is_ok()) {
      end(*session, "polykvd stops");
    } else {
      drop(id, reason);
    }
  }
}

Session* Server::find(SessionId id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() || found->second->is_ending ? nullptr : found->second.get();
}

// ---- accepting ---------------------------------------------------------------------------------

void Server::accept_some() {
  for (int i = 0; i < kAcceptsPerEvent; ++i) {
    UniqueFd socket(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      accept_one(std::move(socket));
      continue;
    }
    const int why = errno;
    if (why == EINTR || why == ECONNABORTED) continue;  // others may wait
    if (why == EMFILE || why == ENFILE) shed_connection(why);
    return;
  }
}

void Server::shed_connection(int why) {
  spare_.reset();
  UniqueFd socket(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) {
    (void)packet_send(socket.get(), error_packet(0, no_descriptor_left()));
    log_warning("shed a connection: no descriptor left (%s)",
                why == EMFILE ? "RLIMIT_NOFILE" : "fs.file-max");
  } else {
    // The backlog stays readable: stop looking at it for a moment instead of spinning.
    loop_.rewatch(listening_.get(), 0);
    loop_.add_timer(kAcceptPauseMs, [this] {
      if (listening_) loop_.rewatch(listening_.get(), EPOLLIN);
    });
  }
  socket.reset();
  spare_ = open_spare();
}

Status Server::admit(const PeerCredentials& credentials) const {
  if (sessions_.size() >= limits_.session_count_max) {
    return {
        POLYKV_ERR_LIMIT,
        format("connect: polykvd serves its maximum of %zu connections; close some, or raise its "
               "RLIMIT_NOFILE (LimitNOFILE= of the service)",
               limits_.session_count_max)};
  }
  const auto found = sessions_of_user_.find(credentials.uid);
  if (found != sessions_of_user_.end() && found->second >= limits_.sessions_per_user_max) {
    return {POLYKV_ERR_LIMIT,
            format("connect: your user has its maximum of %zu connections; close some, or raise "
                   "limits.connections_per_user",
                   limits_.sessions_per_user_max)};
  }
  return Status::ok();
}

void Server::accept_one(UniqueFd socket) {
  const auto refuse = [&](const Status& why) {
    log_warning("refused a connection: %s", why.message().c_str());
    (void)packet_send(socket.get(), error_packet(0, why));
  };
  const Result<PeerCredentials> peer = peer_credentials(socket.get());
  if (!peer) return refuse(peer.status());
  if (const Status admitted = admit(*peer); !admitted.is_ok()) return refuse(admitted);

  std::shared_ptr<Process> process;
  if (identity_.use_peer_pidfd) {
    Result<UniqueFd> pidfd = peer_pidfd(socket.get());
    if (pidfd) {
      Result<std::shared_ptr<Process>> attached =
          processes_.attach(peer->pid, peer->uid, std::move(*pidfd));
      if (!attached) return refuse(attached.status());
      process = std::move(*attached);
    } else if (pidfd.status().code() != POLYKV_ERR_UNSUPPORTED) {
      return refuse(pidfd.status());
    }
  }
  const Result<Session*> added = add_session(std::move(socket), SessionKind::client, *peer);
  if (!added) {
    if (process) processes_.detach(*process);
    log_warning("refused a connection: %s", added.status().message().c_str());
    return;
  }
  (*added)->process = std::move(process);
  ++sessions_of_user_[peer->uid];
}

Result<Session*> Server::add_session(UniqueFd socket, SessionKind kind,
                                     const PeerCredentials& peer) {
  const SessionId id = next_id_++;
  POLYKV_RETURN_IF_ERROR(loop_.watch(socket.get(), EPOLLIN | EPOLLRDHUP,
                                     [this, id](uint32_t events) { on_socket(id, events); }));
  auto session = std::make_unique<Session>();
  session->id = id;
  session->kind = kind;
  session->uid = peer.uid;
  session->credentials = peer;
  session->socket = std::move(socket);
  session->handshake_timer = loop_.add_timer(limits_.handshake_deadline_ms, [this, id] {
    drop(id, {POLYKV_ERR_TIMEOUT, "connect: no Hello within the handshake deadline"});
  });
  Session* raw = session.get();
  sessions_.emplace(id, std::move(session));
  return raw;
}

Result<SessionId> Server::adopt_worker(UniqueFd socket, pid_t pid, UniqueFd pidfd) {
  POLYKV_RETURN_IF_ERROR(set_nonblocking(socket.get(), true));
  const PeerCredentials self{pid, ::getuid()};
  POLYKV_ASSIGN_OR_RETURN(std::shared_ptr<Process> process,
                          processes_.attach(pid, self.uid, std::move(pidfd)));
  const Result<Session*> added = add_session(std::move(socket), SessionKind::worker, self);
  if (!added) {
    processes_.detach(*process);
    return added.status();
  }
  // Loading the tensor library takes longer than a client's handshake may, on a busy machine; the
  // workers' own start deadline covers it.
  loop_.cancel_timer((*added)->handshake_timer);
  (*added)->process = std::move(process);
  return (*added)->id;
}

// ---- receiving ---------------------------------------------------------------------------------

void Server::on_socket(SessionId id, uint32_t events) {
  Session* session = find(id);
  if (session == nullptr) return;
  if ((events & EPOLLOUT) != 0) flush(*session);
  if (session->is_ending) return;
  // What a peer sent before it hung up is still read: a Release is a Release.
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) receive_some(*session);
}

void Server::receive_some(Session& session) {
  for (size_t i = 0; i < limits_.packets_per_event && !session.is_ending; ++i) {
    ReceivedPacket packet;
    const Result<SocketResult> received = packet_receive(session.socket.get(), packet);
    if (!received) return drop(session.id, received.status());
    if (*received == SocketResult::closed) return end(session, "hung up");
    if (*received == SocketResult::would_block) return;
    on_bytes(session, std::move(packet));
  }
}

void Server::on_bytes(Session& session, ReceivedPacket received) {
  const Result<const wire::Packet*> parsed = parse_packet(received.bytes);
  if (!parsed) {
    Status why = parsed.status();
    if (why.code() == POLYKV_ERR_VERSION && session.is_ready) {
      why = {why.code(),
             format("%s (this is polykvd %s; you speak protocol %u)", why.message().c_str(),
                    identity_.version.c_str(), session.protocol_version)};
    }
    return drop(session.id, why);
  }
  const wire::Packet& packet = **parsed;
  if (!session.is_ready) {
    const Status shaken = shake_hands(session, packet, received.fds);
    if (!shaken.is_ok()) drop(session.id, shaken);
    return;
  }
  const Status allowed = check_message(packet, session.kind, received.fds.size());
  if (!allowed.is_ok()) return drop(session.id, allowed);
  handler_->on_packet(session, packet, std::move(received.fds));
}

Status Server::shake_hands(Session& session, const wire::Packet& packet,
                           std::vector<UniqueFd>& fds) {
  const wire::Hello* hello = packet.body_as_Hello();
  if (hello == nullptr) return {POLYKV_ERR_PROTOCOL, "connect: the first packet must be Hello"};
  if (fds.size() != 1) {
    return {POLYKV_ERR_PROTOCOL,
            format("connect: Hello came with %zu descriptors instead of 1", fds.size())};
  }
  if (hello->protocol_version() < kProtocolVersionMin ||
      hello->protocol_version_min() > kProtocolVersion ||
      hello->protocol_version_min() > hello->protocol_version()) {
    return {POLYKV_ERR_VERSION,
            format("connect: polykvd %s speaks protocol %u to %u, the client (library %s) %u to "
                   "%u; update the older side",
                   identity_.version.c_str(), kProtocolVersionMin, kProtocolVersion,
                   printable(text_or_empty(hello->library_version()), 32).c_str(),
                   hello->protocol_version_min(), hello->protocol_version())};
  }
  if (session.process == nullptr) {
    POLYKV_RETURN_IF_ERROR(check_client_pidfd(fds[0].get(), session.credentials));
    POLYKV_ASSIGN_OR_RETURN(session.process, processes_.attach(session.credentials.pid, session.uid,
                                                               std::move(fds[0])));
  }
  loop_.cancel_timer(session.handshake_timer);
  session.client_name = printable(text_or_empty(hello->client_name()), 64);
  session.protocol_version = std::min(hello->protocol_version(), kProtocolVersion);
  session.protocol_version_min = hello->protocol_version_min();
  session.is_ready = true;
  flatbuffers::FlatBufferBuilder builder;
  send_packet(*this, session.id, builder, packet.request_id(),
              wire::CreateWelcomeDirect(
                  builder, session.protocol_version, identity_.epoch, identity_.version.c_str(),
                  static_cast<uint64_t>(limits_.stall_deadline_ms), identity_.backing.c_str(),
                  identity_.device_driver, identity_.device_runtime));
  if (!session.is_ending) handler_->on_session_ready(session);
  return Status::ok();
}

// ---- sending -----------------------------------------------------------------------------------

void Server::send(SessionId id, std::vector<uint8_t> packet, std::vector<SharedFd> fds) {
  Session* session = find(id);
  if (session == nullptr) return;
  const bool was_empty = session->output.empty();
  session->output_bytes += packet.size();
  session->output.push_back({std::move(packet), std::move(fds)});
  if (was_empty) flush(*session);
  if (session->is_ending || session->output.empty()) return;
  if (session->output.size() > limits_.output_queue_packets ||
      session->output_bytes > limits_.output_queue_bytes) {
    return drop(id, {POLYKV_ERR_LIMIT, "the client does not read its replies"});
  }
  if (was_empty) loop_.rewatch(session->socket.get(), EPOLLIN | EPOLLRDHUP | EPOLLOUT);
}

void Server::flush(Session& session) {
  while (!session.output.empty()) {
    const Session::Output& next = session.output.front();
    std::vector<int> fds;
    fds.reserve(next.fds.size());
    for (const SharedFd& fd : next.fds) fds.push_back(fd->get());
    const Result<SocketResult> sent = packet_send(session.socket.get(), next.bytes, fds);
    if (!sent) {
      log_error("session %llu: %s", static_cast<unsigned long long>(session.id),
                sent.status().message().c_str());
      return end(session, "cannot be sent to");
    }
    if (*sent == SocketResult::closed) return end(session, "hung up");
    if (*sent == SocketResult::would_block) return;
    session.output_bytes -= next.bytes.size();
    session.output.pop_front();
    if (session.output.empty()) loop_.rewatch(session.socket.get(), EPOLLIN | EPOLLRDHUP);
  }
}

void Server::reply_error(SessionId id, uint64_t request_id, const Status& error) {
  send(id, error_packet(request_id, error));
}

void Server::reply_done(SessionId id, uint64_t request_id) {
  flatbuffers::FlatBufferBuilder builder;
  send_packet(*this, id, builder, request_id, wire::CreateDone(builder));
}

// ---- ending ------------------------------------------------------------------------------------

void Server::drop(SessionId id, const Status& reason) {
  Session* session = find(id);
  if (session == nullptr) return;
  log_warning("dropped session %llu of uid %u pid %d (%s): %s", static_cast<unsigned long long>(id),
              session->uid, session->credentials.pid, session->client_name.c_str(),
              reason.message().c_str());
  if (session->output.empty()) (void)packet_send(session->socket.get(), error_packet(0, reason));
  end(*session, "dropped");
}

void Server::close(SessionId id) {
  if (Session* session = find(id)) end(*session, "not needed any more");
}

void Server::end_sessions_of(const Process& process) {
  for (auto& [id, session] : sessions_) {
    if (session->process.get() == &process && !session->is_ending) end(*session, "process is gone");
  }
}

void Server::end(Session& session, const char* why) {
  assert(!session.is_ending);
  session.is_ending = true;
  log_debug("session %llu ends: %s", static_cast<unsigned long long>(session.id), why);
  loop_.cancel_timer(session.handshake_timer);
  loop_.unwatch(session.socket.get());
  // A forked child may hold the client's end: shut down, so that it learns of the end.
  ::shutdown(session.socket.get(), SHUT_RDWR);
  loop_.defer([this, id = session.id] { finish_end(id); });
}

void Server::finish_end(SessionId id) {
  const auto found = sessions_.find(id);
  const std::unique_ptr<Session> session = std::move(found->second);
  sessions_.erase(found);
  if (session->is_ready) handler_->on_session_end(*session);
  if (session->process) processes_.detach(*session->process);
  if (session->kind == SessionKind::client) {
    const auto count = sessions_of_user_.find(session->uid);
    if (--count->second == 0) sessions_of_user_.erase(count);
  }
}

}  // namespace polykv::daemon
