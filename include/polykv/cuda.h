/*
 * polykv on the GPU: documents that polykvd keeps in device memory (polykvd --backing cuda), and
 * documents in host memory that the caller wants to read on a GPU.
 *
 * Nothing here needs CUDA's headers, and libpolykv does not link CUDA: it loads libpolykv_cuda.so.0
 * when one of these functions first needs it (POLYKV_CUDA_LIBRARY names another file). A stream is a
 * cudaStream_t as void*; NULL is the default stream.
 *
 * Rules beyond those of polykv/polykv.h:
 *   - A lease on a document in device memory works with every function of polykv/polykv.h as well:
 *     facts and tokens need no GPU, and polykv_layer_decode and polykv_layer_attend read a copy in
 *     host memory that they make of each layer once. That is slow and takes host memory; it is for
 *     programs that look at a document now and then.
 *   - GPUs are matched by UUID and never by number, so processes may have different
 *     CUDA_VISIBLE_DEVICES.
 *   - The library makes the document's GPU current for the calling thread and leaves it so.
 *   - An allocation is opened once in a process, however many leases, and is closed with the last.
 *   - A device pointer is valid until its lease is released, and only while polykvd lives: once a
 *     call returns POLYKV_ERR_DAEMON_GONE or POLYKV_ERR_DEVICE_LOST, what the memory holds is
 *     undefined. Stop using it and release the lease. Because only the session tells, closing it
 *     ends the reading of device memory as well, other than that of host memory.
 *   - The driver has no read-only import: whoever imports a segment can damage it, which is why
 *     such documents are served to polykvd's own user alone. polykv_lease_verify recomputes the
 *     checksums of what is in device memory.
 *
 * C11 and C++20; no exception leaves the library.
 */
#ifndef POLYKV_CUDA_H
#define POLYKV_CUDA_H

#include "polykv/polykv.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Where a lease is to be read. */
typedef struct polykv_cuda_device {
  size_t struct_size;
  int index; /* CUDA's number of it in this process */
  char name[128];
  char uuid[48]; /* "GPU-01234567-89ab-cdef-0123-456789abcdef" */
} polykv_cuda_device;
POLYKV_API void polykv_cuda_device_init(polykv_cuda_device* device);

/**
 * The GPU of a document in device memory; loads the CUDA library. Errors: UNSUPPORTED (the document
 * is in host memory, or there is no CUDA library), WRONG_DEVICE (this process does not see the GPU;
 * tells both), VERSION (the driver here is not polykvd's; tells both).
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_cuda_lease_device(const polykv_lease* lease,
                                                                   polykv_cuda_device* out);

/**
 * One layer in one segment, packed, in device memory. The payload's bytes are what
 * docs/segment-format.md draws; not owned, valid until the lease is released.
 */
typedef struct polykv_cuda_layer_view {
  size_t struct_size;
  uint64_t first_token; /* of the document */
  uint64_t token_count;
  polykv_layer_geometry geometry;
  polykv_profile profile; /* of this layer */
  const void* payload;    /* device pointer, 64-byte aligned */
  uint64_t payload_bytes;
  int device; /* CUDA's number, in this process, of the GPU whose memory it is */
} polykv_cuda_layer_view;
POLYKV_API void polykv_cuda_layer_view_init(polykv_cuda_layer_view* view);

/**
 * segment: 0 .. segment_count-1, in token order. device: the GPU that will read it, by CUDA's number
 * in this process; -1: the one that it is on. Of a document in device memory, or after
 * polykv_cuda_lease_stage. Errors: WRONG_DEVICE (the two GPUs have no peer access; tells both),
 * UNSUPPORTED (neither), DAEMON_GONE, DEVICE_LOST, and those of polykv_cuda_lease_device.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_cuda_lease_layer_view(const polykv_lease* lease,
                                                                       uint32_t segment,
                                                                       uint32_t layer, int device,
                                                                       polykv_cuda_layer_view* out);

/**
 * For a document in host memory: how many bytes of device memory its segments take, packed, about a
 * third of what they take as bf16. UNSUPPORTED: it is in device memory already. BUSY: it is still
 * being produced.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_cuda_lease_staging_bytes(const polykv_lease* lease,
                                                                          uint64_t* out);
/**
 * Copies the segments to the caller's device memory on GPU `device` (CUDA's number in this process),
 * which is 256-byte aligned and has target_bytes; done when it returns. From then on
 * polykv_cuda_lease_layer_view tells places in it, so it must stay until the lease is released, or
 * staged again elsewhere. Not while another thread uses the lease on the GPU. Errors: those of
 * polykv_cuda_lease_staging_bytes, INVALID_ARGUMENT (target too small; tells both sizes), UNSUPPORTED
 * (no CUDA library), WRONG_DEVICE.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_cuda_lease_stage(polykv_lease* lease, int device,
                                                                  void* target,
                                                                  uint64_t target_bytes);

/**
 * Waits for the given streams of the calling process, which may still read the lease's device memory,
 * then releases it as polykv_lease_release does (which waits for all streams of the GPU instead).
 * Frees the handle whatever it returns. streams may be NULL when stream_count is 0.
 */
POLYKV_API polykv_status polykv_cuda_lease_release(polykv_lease* lease, void* const* streams,
                                                   size_t stream_count);

/**
 * As polykv_segment_begin, but this process writes the payload to device memory and polykvd reads it
 * back to verify it; otherwise a segment is encoded in memory that it shares with polykvd, which
 * copies it. For producers that are on the GPU anyway. polykv_segment_encode_layer and
 * polykv_segment_commit are the same; the commit waits until the payload has arrived. Errors beyond
 * those of polykv_segment_begin: those of polykv_cuda_lease_device.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_cuda_segment_begin(polykv_publisher* publisher,
                                                                    uint64_t token_count,
                                                                    polykv_segment** out);

#ifdef __cplusplus
}
#endif

#endif
