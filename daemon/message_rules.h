// Which message may come from whom, with how many descriptors. Pure functions.
#pragma once

#include <cstddef>

#include "common/result.h"
#include "internal/protocol_generated.h"

namespace polykv::daemon {

enum class SessionKind { client, worker };

/// Checks sender, request id and the exact number of descriptors of a packet that came after the
/// handshake. POLYKV_ERR_PROTOCOL ends the connection.
Status check_message(const wire::Packet& packet, SessionKind sender, size_t fd_count);

}  // namespace polykv::daemon
