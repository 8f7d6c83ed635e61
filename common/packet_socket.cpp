#include "common/packet_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace polykv {

Result<SocketResult> packet_send(int socket, std::span<const uint8_t> bytes,
                                 std::span<const int> fds) {
  if (bytes.empty() || bytes.size() > kMaxPacketBytes || fds.size() > kMaxPacketFds) {
    return {POLYKV_ERR_LIMIT,
            format("send a packet: %zu bytes and %zu descriptors; at most %zu and %zu are allowed",
                   bytes.size(), fds.size(), kMaxPacketBytes, kMaxPacketFds)};
  }
  iovec part{const_cast<uint8_t*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(int) * kMaxPacketFds)> control{};
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  while (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return SocketResult::would_block;
    if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) return SocketResult::closed;
    return system_error(
        "send a packet", errno,
        errno == ETOOMANYREFS ? "too many descriptors are in flight; see RLIMIT_NOFILE" : "");
  }
  return SocketResult::done;
}

Result<SocketResult> packet_receive(int socket, ReceivedPacket& out) {
  out.bytes.resize(kMaxPacketBytes);
  out.fds.clear();
  iovec part{out.bytes.data(), out.bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(int) * kMaxPacketFds)> control;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t size = 0;
  while ((size = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0) {
    if (errno == EINTR) continue;
    out.bytes.clear();
    if (errno == EAGAIN || errno == EWOULDBLOCK) return SocketResult::would_block;
    if (errno == ECONNRESET || errno == ENOTCONN) return SocketResult::closed;
    return system_error("receive a packet", errno);
  }
  // Own what came before anything can fail.
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      out.fds.emplace_back(fd);
    }
  }
  out.bytes.resize(static_cast<size_t>(size));
  if ((message.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) != 0) {
    const bool descriptors = (message.msg_flags & MSG_CTRUNC) != 0;
    out.fds.clear();
    out.bytes.clear();
    return {POLYKV_ERR_PROTOCOL,
            descriptors
                ? "receive a packet: more descriptors than the protocol allows, or none left "
                  "to receive them (see RLIMIT_NOFILE)"
                : "receive a packet: longer than the protocol allows (64 KiB)"};
  }
  return size == 0 ? SocketResult::closed : SocketResult::done;
}

Result<std::pair<UniqueFd, UniqueFd>> packet_socketpair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    return system_error("make a socket pair", errno);
  return std::pair(UniqueFd(ends[0]), UniqueFd(ends[1]));
}

Result<UniqueFd> packet_connect(const std::string& path, int64_t timeout_ms) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("connect to '%s': a socket's path has 1 to %zu bytes", path.c_str(),
                   sizeof address.sun_path - 1)};
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) return system_error("make a socket", errno, "see RLIMIT_NOFILE");
  if (timeout_ms >= 0) {
    // Zero would mean "no bound" to the kernel. For a socket of this family it bounds connect(2).
    const int64_t bounded_ms = timeout_ms == 0 ? 1 : timeout_ms;
    const timeval bound{bounded_ms / 1000, bounded_ms % 1000 * 1000};
    if (::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound) != 0) {
      return system_error("bound the wait for a connection", errno);
    }
  }
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) !=
         0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) {
      return {POLYKV_ERR_TIMEOUT,
              format("connect to '%s': nobody accepts the connection; is polykvd stopped?",
                     path.c_str())};
    }
    if (errno == EACCES || errno == EPERM) {
      return {POLYKV_ERR_PERMISSION,
              format("connect to '%s': permission denied; is your user in the socket's group?",
                     path.c_str())};
    }
    return {
        POLYKV_ERR_DAEMON_UNREACHABLE,
        format("connect to '%s': %s; start polykvd (systemctl --user start polykvd.socket, or run "
               "polykvd)",
               path.c_str(),
               std::strerror(
                   errno))};  // NOLINT(concurrency-mt-unsafe): glibc's is safe for known numbers
  }
  return socket;
}

Status set_nonblocking(int fd, bool nonblocking) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 ||
      ::fcntl(fd, F_SETFL, nonblocking ? flags | O_NONBLOCK : flags & ~O_NONBLOCK) != 0) {
    return system_error("set a descriptor's blocking mode", errno);
  }
  return Status::ok();
}

}  // namespace polykv
