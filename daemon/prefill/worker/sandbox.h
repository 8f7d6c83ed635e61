// What polykv-prefill may still do once it has looked at an untrusted model: compute, read the
// descriptors it was given, and talk to polykvd. No torch.
//
// Allowed afterwards: reading and writing open descriptors, receiving descriptors, memory, threads,
// clocks, memfd_create (the token list of an Acquire). Refused with EPERM, by an allow list:
// opening or creating files, sockets, connections, exec, fork, signals to others, ptrace, mounts,
// and every system call that nobody thought of.
#pragma once

#include <cstdint>

#include "common/result.h"

namespace polykv {

struct SandboxLimits {
  /// Private writable memory beyond what the process has now (RLIMIT_DATA); 0: no limit. A backstop
  /// behind the memory statement that the worker makes before it starts.
  uint64_t memory_bytes = 0;
  uint32_t descriptor_count = 64;
  /// Largest memfd that may be written with write(2) (RLIMIT_FSIZE).
  uint64_t file_bytes = uint64_t{64} << 20;
  /// The process has a CUDA context: see the second list in sandbox.cpp. More descriptors are allowed as well.
  bool uses_gpu = false;
};

/// Never to be undone, for all threads of the process, those that exist and those to come. Call it
/// after everything that opens files lazily (thread pools, BLAS) has run once. ERR_SYSTEM or
/// ERR_UNSUPPORTED (a kernel without seccomp) leave the process half locked: exit then.
Status enter_sandbox(const SandboxLimits& limits);

/// The part that needs no warm-up: the process dies with its parent thread, leaves no core file,
/// cannot be traced by others of its user, and gains no privileges. Call it first in main().
Status harden_process();

}  // namespace polykv
