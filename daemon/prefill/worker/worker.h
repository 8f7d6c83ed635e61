// polykv-prefill from its first packet to its last: one model, one job after the other.
#pragma once

#include "common/fd.h"
#include "common/result.h"

namespace polykv {

/// Serves polykvd at the other end of `socket` until it closes it: that is success. Everything else
/// is why this worker had to end; polykvd has been told, if it still listens.
Status run_worker(UniqueFd socket);

}  // namespace polykv
