// Decoding and attending on a GPU: what Lease::decode and attend() do, by kernels on the caller's stream.
#pragma once

#include "kernels/cuda/library.h"
#include "libclient/attend.h"
#include "libclient/lease.h"

namespace polykv::lib {

/// The kernels of client_library(). POLYKV_ERR_UNSUPPORTED, POLYKV_ERR_VERSION.
Result<cuda::Kernels*> client_kernels();

/// Where and in which order: a GPU by this process's number (-1: the document's), its stream.
struct Queue {
  int device = -1;
  void* stream = nullptr;
};

/// Pointers of the requests are that GPU's, first_tokens among them. The document is in device memory, or
/// staged. Threads may call them at once.
Status decode_on_device(const Lease& lease, uint32_t layer, const DecodeRequest& request,
                        const Queue& queue);
Result<uint64_t> attend_workspace_bytes(const Lease& lease, uint32_t layer,
                                        const AttendRequest& request, int device);
Status attend_on_device(const Lease& lease, uint32_t layer, const AttendRequest& request,
                        const cuda::Workspace& workspace, const Queue& queue);

}  // namespace polykv::lib
