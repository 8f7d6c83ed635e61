// SOCK_SEQPACKET with descriptors: one packet in, one packet out. Functions are thread-safe per
// direction.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/fd.h"
#include "common/result.h"

namespace polykv {

inline constexpr uint32_t kProtocolVersion = 2;
inline constexpr uint32_t kProtocolVersionMin = 1;
inline constexpr size_t kMaxPacketBytes = 64 * 1024;
inline constexpr size_t kMaxPacketFds = 16;  // the kernel's limit is 253

struct ReceivedPacket {
  std::vector<uint8_t> bytes;
  std::vector<UniqueFd> fds;  // CLOEXEC
};

enum class SocketResult { done, would_block, closed };

/// Sends one packet, whole or not at all. closed: the peer is gone (EPIPE, ECONNRESET); never
/// SIGPIPE. ERR_LIMIT: too large or too many descriptors. Other failures: ERR_SYSTEM.
Result<SocketResult> packet_send(int socket, std::span<const uint8_t> bytes,
                                 std::span<const int> fds = {});

/// Receives one packet. Descriptors arrive owned, whatever happens next. ERR_PROTOCOL: MSG_CTRUNC
/// or MSG_TRUNC, all descriptors closed; the caller drops the peer. A packet of no bytes counts as
/// closed.
Result<SocketResult> packet_receive(int socket, ReceivedPacket& out);

/// A connected pair, or a connection; CLOEXEC, blocking.
Result<std::pair<UniqueFd, UniqueFd>> packet_socketpair();
/// ERR_DAEMON_UNREACHABLE when nobody listens or the path is not there; ERR_PERMISSION;
/// ERR_INVALID_ARGUMENT (path too long).
/// timeout_ms bounds the wait for a listener whose queue is full (ERR_TIMEOUT); negative: no bound.
Result<UniqueFd> packet_connect(const std::string& path, int64_t timeout_ms = -1);

/// Makes fd (non-)blocking.
Status set_nonblocking(int fd, bool nonblocking);

}  // namespace polykv
