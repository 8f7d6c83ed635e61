// Anonymous files in memory: created without execute permission where the kernel knows how, sealed,
// and read with distrust. Functions are thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/fd.h"
#include "common/result.h"

namespace polykv {

/// MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL; without the last on a kernel that answers
/// EINVAL. `label` is for /proc listings alone.
Result<UniqueFd> memfd_create_sealable(const char* label);

/// A fully sealed memfd (write, grow, shrink, seal) holding the ids. ids must not be empty.
Result<UniqueFd> memfd_from_tokens(std::span<const uint32_t> ids);

/// Copies exactly token_count ids out of a peer's descriptor into private memory. The descriptor
/// must be a memfd sealed against writing and shrinking (else a peer could change it or make us die
/// of SIGBUS) of exactly that size.
Result<std::vector<uint32_t>> memfd_read_tokens(int fd, uint64_t token_count,
                                                uint64_t max_token_count);

}  // namespace polykv
