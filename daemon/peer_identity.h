// Who is at the other end of a socket: by the kernel's word, never by the client's. Pure functions
// of descriptors.
#pragma once

#include <sys/types.h>

#include "common/fd.h"
#include "common/result.h"

namespace polykv::daemon {

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};

/// What the kernel shows for a user that this user namespace does not know. Many users at once, so
/// never one domain.
inline constexpr uid_t kOverflowUid = 65534;

/// SO_PEERCRED. POLYKV_ERR_PERMISSION for the overflow user id, or a process that this PID
/// namespace does not know.
Result<PeerCredentials> peer_credentials(int socket);

/// What a client is told when polykvd is out of descriptors.
Status no_descriptor_left();

/// SO_PEERPIDFD (Linux 6.5). POLYKV_ERR_UNSUPPORTED on older kernels, POLYKV_ERR_LIMIT as above.
Result<UniqueFd> peer_pidfd(int socket);

/// Checks a pidfd that a client sent of itself against its credentials, by /proc/self/fdinfo.
/// POLYKV_ERR_PERMISSION: it is no pidfd, of another process, or of one that is gone.
Status check_client_pidfd(int pidfd, const PeerCredentials& credentials);

/// Whether the process of a pidfd has exited.
bool pidfd_has_exited(int pidfd);

}  // namespace polykv::daemon
