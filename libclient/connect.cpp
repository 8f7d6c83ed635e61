// Finding the daemon and shaking hands.
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>

#include "common/packet_socket.h"
#include "libclient/session.h"
#include "polykv/version.h"

namespace polykv::lib {

namespace {

// pidfd_open(2) is older than glibc's wrapper for it.
Result<UniqueFd> open_own_pidfd() {
  const long fd = ::syscall(SYS_pidfd_open, ::getpid(), 0);
  if (fd < 0) {
    return system_error("connect to polykvd: open a pidfd of this process", errno,
                        "Linux 5.3 or later is needed, and seccomp must allow pidfd_open");
  }
  return UniqueFd(static_cast<int>(fd));
}

Result<UniqueFd> open_socket(const ConnectOptions& options) {
  std::vector<std::string> paths{options.socket_path};
  if (options.socket_path.empty()) paths = default_socket_paths();
  std::string tried;
  polykv_status code = POLYKV_ERR_DAEMON_UNREACHABLE;
  for (const std::string& path : paths) {
    Result<UniqueFd> socket = packet_connect(path, options.timeout_ms);
    if (socket.is_ok() || paths.size() == 1) return socket;
    tried += (tried.empty() ? "" : " | ") + socket.status().message();
    // A daemon that is there and refuses tells more than one that is not there.
    if (socket.status().code() != POLYKV_ERR_DAEMON_UNREACHABLE) code = socket.status().code();
  }
  return {code, tried};
}

/// " at 'PATH'"; nothing for a worker's socket, which has no path.
std::string place_of(int socket) {
  sockaddr_un address{};
  socklen_t size = sizeof address;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      size <= offsetof(sockaddr_un, sun_path)) {
    return "";
  }
  return format(" at '%.*s'", static_cast<int>(sizeof address.sun_path), address.sun_path);
}

}  // namespace

std::vector<std::string> default_socket_paths() {
  const char* chosen = std::getenv("POLYKV_SOCKET");
  if (chosen != nullptr && *chosen != '\0') return {chosen};
  std::vector<std::string> paths;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime != '\0') {
    paths.push_back(std::string(runtime) + "/polykv/polykv.sock");
  }
  paths.emplace_back("/run/polykv/polykv.sock");
  return paths;
}

Result<std::shared_ptr<Session>> Session::connect(const ConnectOptions& options) {
  const Deadline deadline = deadline_after_ms(options.timeout_ms);
  POLYKV_ASSIGN_OR_RETURN(UniqueFd socket, open_socket(options));
  return adopt(std::move(socket), options.client_name, deadline);
}

Result<std::shared_ptr<Session>> Session::adopt(UniqueFd socket, const std::string& client_name,
                                                Deadline deadline, bool is_worker) {
  POLYKV_RETURN_IF_ERROR(set_nonblocking(socket.get(), true));
  std::shared_ptr<Session> session(new Session(std::move(socket), is_worker));
  const Status greeted = session->shake_hands(client_name, deadline);
  if (!greeted.is_ok())
    return greeted.with_context("connect to polykvd" + place_of(session->socket_.get()));
  return session;
}

Status Session::shake_hands(const std::string& client_name, Deadline deadline) {
  POLYKV_ASSIGN_OR_RETURN(const UniqueFd pidfd, open_own_pidfd());
  flatbuffers::FlatBufferBuilder builder;
  const auto version = builder.CreateString(POLYKV_VERSION_TEXT);
  const auto name = builder.CreateString(client_name.empty() ? program_invocation_short_name
                                                             : client_name.c_str());
  const auto hello =
      wire::CreateHello(builder, kProtocolVersion, kProtocolVersionMin, version, name);
  const int fds[] = {pidfd.get()};
  POLYKV_ASSIGN_OR_RETURN(const Message reply, call<wire::Welcome>(builder, hello, fds, deadline));
  const auto* welcome = reply.as<wire::Welcome>();
  if (welcome->protocol_version() < kProtocolVersionMin ||
      welcome->protocol_version() > kProtocolVersion) {
    return {POLYKV_ERR_VERSION,
            format("polykvd speaks protocol version %u, this library %u to %u; update the older",
                   welcome->protocol_version(), kProtocolVersionMin, kProtocolVersion)};
  }
  epoch_ = welcome->epoch();
  stall_deadline_ms_ = welcome->stall_deadline_ms();
  daemon_version_ = text_or_empty(welcome->daemon_version());
  device_driver_ = welcome->device_driver();
  return Status::ok();
}

}  // namespace polykv::lib
