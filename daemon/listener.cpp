#include "daemon/listener.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "common/packet_socket.h"

namespace polykv::daemon {

namespace {

Status make_own_folder(const std::string& path, bool for_everybody) {
  const std::string folder = path.substr(0, path.rfind('/'));
  if (::mkdir(folder.c_str(), for_everybody ? 0755 : 0700) == 0 || errno == EEXIST)
    return Status::ok();
  return system_error("make the socket's folder " + folder, errno, "check its parent folder");
}

/// Removes the socket file that a daemon left behind. Nobody else starts here: we hold the lock.
Status remove_stale(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return Status::ok();
    return system_error("look at " + path, errno);
  }
  if (!S_ISSOCK(info.st_mode)) {
    return {POLYKV_ERR_ALREADY_EXISTS,
            "listen on " + path +
                ": there is a file that is no socket; remove it, or choose another "
                "--socket"};
  }
  // Somebody may serve it without our lock file, for example a service manager.
  if (packet_connect(path).is_ok()) {
    return {POLYKV_ERR_ALREADY_EXISTS,
            "listen on " + path +
                ": somebody accepts connections there; stop it (systemctl stop "
                "polykvd.socket), or choose another --socket"};
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    return system_error("remove the stale socket " + path, errno);
  return Status::ok();
}

Result<UniqueFd> bind_and_listen(const std::string& path, uint32_t mode) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("listen on %s: a socket's path has at most %zu bytes; choose a shorter --socket",
                   path.c_str(), sizeof address.sun_path - 1)};
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) return system_error("make a socket", errno);
  // Nobody can connect before listen(), so the mode is right from the first connection on.
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return system_error("listen on " + path, errno, "check its folder and the path's length");
  if (::chmod(path.c_str(), mode) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
    const int why = errno;
    ::unlink(path.c_str());
    return system_error("listen on " + path, why);
  }
  return socket;
}

}  // namespace

Result<std::string> choose_socket_path(const Options& options,
                                       const SocketEnvironment& environment) {
  if (!options.socket_path.empty()) return options.socket_path;
  if (environment.is_root) return std::string("/run/polykv/polykv.sock");
  if (!environment.xdg_runtime_dir.empty())
    return environment.xdg_runtime_dir + "/polykv/polykv.sock";
  return {POLYKV_ERR_INVALID_ARGUMENT,
          "listen: XDG_RUNTIME_DIR is not set, so there is no default socket; give --socket"};
}

Result<std::unique_ptr<Listener>> Listener::from_service_manager() {
  const int count = ::sd_listen_fds(1);
  if (count < 0) return system_error("take the service manager's sockets", -count);
  if (count == 0) return std::unique_ptr<Listener>();
  if (count != 1 || ::sd_is_socket_unix(SD_LISTEN_FDS_START, SOCK_SEQPACKET, 1, nullptr, 0) <= 0) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("take the service manager's sockets: got %d; polykvd needs exactly one, with "
                   "ListenSequentialPacket= in polykvd.socket",
                   count)};
  }
  std::unique_ptr<Listener> listener(new Listener);
  listener->socket_ = UniqueFd(SD_LISTEN_FDS_START);
  if (::fcntl(SD_LISTEN_FDS_START, F_SETFD, FD_CLOEXEC) != 0)
    return system_error("take the service manager's socket", errno);
  sockaddr_un address{};
  socklen_t size = sizeof address;
  if (::getsockname(SD_LISTEN_FDS_START, reinterpret_cast<sockaddr*>(&address), &size) == 0)
    listener->path_ = address.sun_path;
  return listener;
}

Result<UniqueFd> Listener::take_lock(const std::string& lock_path, const std::string& socket_path) {
  constexpr int kTries = 16;
  for (int i = 0; i < kTries; ++i) {
    UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!lock) return system_error("open the lock file " + lock_path, errno, "check its folder");
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return system_error("lock " + lock_path, errno);
      std::array<char, 16> pid{};
      const ssize_t length = ::pread(lock.get(), pid.data(), pid.size() - 1, 0);
      return {POLYKV_ERR_ALREADY_EXISTS,
              format("listen on %s: another polykvd (pid %.*s) serves it; stop that one, or choose "
                     "another --socket",
                     socket_path.c_str(), length > 0 ? static_cast<int>(length) : 1,
                     length > 0 ? pid.data() : "?")};
    }
    // The one before us removes its lock file when it ends: is ours still the one of that name?
    struct stat ours;
    struct stat named;
    if (::fstat(lock.get(), &ours) == 0 && ::stat(lock_path.c_str(), &named) == 0 &&
        ours.st_ino == named.st_ino && ours.st_dev == named.st_dev) {
      const std::string pid = std::to_string(::getpid());
      if (::ftruncate(lock.get(), 0) != 0 || ::pwrite(lock.get(), pid.data(), pid.size(), 0) < 0)
        return system_error("write the lock file " + lock_path, errno);
      return lock;
    }
  }
  return {POLYKV_ERR_SYSTEM, "lock " + lock_path + ": it is replaced again and again; try again"};
}

Result<std::unique_ptr<Listener>> Listener::open(const std::string& path, bool make_folder,
                                                 uint32_t mode) {
  if (path.empty() || path[0] != '/') {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "listen on '" + path + "': a socket's path is absolute; write all of it"};
  }
  if (make_folder) POLYKV_RETURN_IF_ERROR(make_own_folder(path, path.starts_with("/run/polykv/")));
  POLYKV_ASSIGN_OR_RETURN(UniqueFd lock, take_lock(path + ".lock", path));
  std::unique_ptr<Listener> listener(new Listener);
  const auto unlock = [&](const Status& why) {
    ::unlink((path + ".lock").c_str());
    return why;
  };
  if (const Status removed = remove_stale(path); !removed.is_ok()) return unlock(removed);
  Result<UniqueFd> socket = bind_and_listen(path, mode);
  if (!socket) return unlock(socket.status());
  listener->socket_ = std::move(*socket);
  listener->lock_ = std::move(lock);
  listener->path_ = path;
  return listener;
}

Listener::~Listener() {
  if (!lock_) return;
  ::unlink(path_.c_str());
  ::unlink((path_ + ".lock").c_str());
}

}  // namespace polykv::daemon
