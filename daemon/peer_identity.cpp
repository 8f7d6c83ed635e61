#include "daemon/peer_identity.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <string>
#include <string_view>

// Linux 6.5; Debian 12's headers do not have it.
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace polykv::daemon {

Result<PeerCredentials> peer_credentials(int socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0)
    return system_error("read a peer's credentials", errno);
  if (credentials.uid == kOverflowUid) {
    return {POLYKV_ERR_PERMISSION,
            "connect: user id 65534 stands for users unknown to this namespace, so it cannot be "
            "told apart; map your user id into the container, or run polykvd inside it"};
  }
  if (credentials.pid <= 0) {
    return {POLYKV_ERR_PERMISSION,
            "connect: your process is in a PID namespace that polykvd cannot see; share the PID "
            "namespace, or run polykvd inside it"};
  }
  return PeerCredentials{credentials.pid, credentials.uid};
}

Status no_descriptor_left() {
  return {POLYKV_ERR_LIMIT,
          "connect: polykvd has no descriptor left; close sessions, or raise its RLIMIT_NOFILE "
          "(LimitNOFILE= of the service)"};
}

Result<UniqueFd> peer_pidfd(int socket) {
  int fd = -1;
  socklen_t size = sizeof fd;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &size) != 0) {
    if (errno == ENOPROTOOPT)
      return {POLYKV_ERR_UNSUPPORTED, "read a peer's pidfd: kernel before 6.5"};
    if (errno == EMFILE || errno == ENFILE) return no_descriptor_left();
    return system_error("read a peer's pidfd", errno);
  }
  return UniqueFd(fd);
}

Status check_client_pidfd(int pidfd, const PeerCredentials& credentials) {
  const auto refuse = [](const char* why) {
    return Status(POLYKV_ERR_PERMISSION, std::string("connect: the descriptor sent with Hello ") +
                                             why + "; send a pidfd of the connecting process");
  };
  std::array<char, 64> link{};
  const ssize_t length =
      ::readlink(format("/proc/self/fd/%d", pidfd).c_str(), link.data(), link.size());
  // "anon_inode:[pidfd]", from Linux 6.9 on "pidfd:[inode]". A file of such a name begins with '/'.
  const std::string_view target(link.data(), length > 0 ? static_cast<size_t>(length) : 0);
  if (!target.starts_with("anon_inode:[pidfd]") && !target.starts_with("pidfd:["))
    return refuse("is no pidfd");
  std::ifstream info(format("/proc/self/fdinfo/%d", pidfd));
  long pid = 0;
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("Pid:")) pid = std::strtol(line.c_str() + 4, nullptr, 10);
  }
  if (pid != credentials.pid) return refuse("is of another process");
  if (pidfd_has_exited(pidfd)) return refuse("is of a process that has exited");
  return Status::ok();
}

bool pidfd_has_exited(int pidfd) {
  pollfd entry{pidfd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

}  // namespace polykv::daemon
