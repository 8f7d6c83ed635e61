// The listening socket: from the service manager, or our own behind a lock file.
#pragma once

#include <memory>
#include <string>

#include "common/fd.h"
#include "common/result.h"
#include "daemon/options.h"

namespace polykv::daemon {

struct SocketEnvironment {
  std::string xdg_runtime_dir;  // empty when unset
  bool is_root = false;
};

/// The configured path, else $XDG_RUNTIME_DIR/polykv/polykv.sock, or /run/polykv/polykv.sock for
/// root. POLYKV_ERR_INVALID_ARGUMENT when a user has no XDG_RUNTIME_DIR.
Result<std::string> choose_socket_path(const Options& options,
                                       const SocketEnvironment& environment);

/// Owns what it made in the file system; the destructor removes it.
class Listener {
 public:
  /// The socket that the service manager passed, if it did; else nothing.
  static Result<std::unique_ptr<Listener>> from_service_manager();
  /// Takes the lock beside the path, removes a stale socket, binds and listens. The folder of a
  /// default path is made. POLYKV_ERR_ALREADY_EXISTS when another polykvd serves this path, which
  /// is not touched then.
  static Result<std::unique_ptr<Listener>> open(const std::string& path, bool make_folder,
                                                uint32_t mode);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  /// The socket, once.
  UniqueFd take_socket() { return std::move(socket_); }
  const std::string& path() const { return path_; }

 private:
  Listener() = default;
  static Result<UniqueFd> take_lock(const std::string& lock_path, const std::string& socket_path);

  UniqueFd socket_;
  std::string path_;  // ours to remove; from the service manager: for people
  UniqueFd lock_;     // invalid: from the service manager
};

}  // namespace polykv::daemon
