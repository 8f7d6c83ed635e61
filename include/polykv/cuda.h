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
 *     such documents are served to polykvd's own user alone. polykv_lease_verify has the GPU
 *     recompute the checksums of what is in device memory, and takes 2 MiB of it meanwhile.
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
 * which is 256-byte aligned and has target_bytes; done when it returns. No work may be pending on any
 * stream that still uses the target. From then on
 * polykv_cuda_lease_layer_view tells places in it, so it must stay until the lease is released, or
 * staged again elsewhere. Not while another thread uses the lease on the GPU. Errors: those of
 * polykv_cuda_lease_staging_bytes, INVALID_ARGUMENT (target too small; tells both sizes), UNSUPPORTED
 * (no CUDA library), WRONG_DEVICE.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_cuda_lease_stage(polykv_lease* lease, int device,
                                                                  void* target,
                                                                  uint64_t target_bytes);

/** Where a call runs and in which order. All zero but for the device is the default stream. */
typedef struct polykv_cuda_queue {
  size_t struct_size;
  int device;   /* CUDA's number in this process; -1: the GPU that the document is on */
  void* stream; /* a cudaStream_t of that GPU */
} polykv_cuda_queue;
POLYKV_API void polykv_cuda_queue_init(polykv_cuda_queue* queue);

/**
 * As polykv_layer_decode, by kernels that are queued on the stream: nothing is waited for, and the
 * options' pointers are the GPU's, aligned to their elements. Of a document in device memory, or after
 * polykv_cuda_lease_stage.
 * head_dims up to 256. An error of the GPU itself comes with a later call of the CUDA runtime, as
 * usual. Errors, with nothing queued for the segment concerned: those of polykv_layer_decode and of
 * polykv_cuda_lease_layer_view, UNSUPPORTED (head_dims above 256, paper-k8v3 with a V head_dim of 8; a
 * CUDA library without kernels), SYSTEM.
 */
POLYKV_API POLYKV_NODISCARD polykv_status
polykv_cuda_layer_decode(const polykv_lease* lease, uint32_t layer,
                         const polykv_decode_options* options, const polykv_cuda_queue* queue);

/**
 * How much device memory polykv_cuda_layer_attend needs beside its results while it runs: of exactly
 * these options, whose pointers are not followed but must not be NULL. With the same rows, heads and
 * GPU, more tokens never need less, so that a caller whose document grows asks once for all of it; other
 * numbers of rows are asked for anew. Errors: those of polykv_cuda_layer_attend.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_cuda_attend_workspace_bytes(
    const polykv_lease* lease, uint32_t layer, const polykv_attend_options* options,
    const polykv_cuda_queue* queue, uint64_t* out);

/**
 * As polykv_layer_attend, by kernels that are queued on the stream; the options' pointers
 * (query_first_tokens among them) and the workspace are the GPU's. workspace: 256-byte aligned,
 * one for each stream that attends at a time. A row with a logit that is no finite number gets NaN in
 * output and log-sum-exp. thread_count means nothing here. Equal calls give equal bits. Errors, with
 * nothing queued: those of polykv_layer_attend and polykv_cuda_layer_decode.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_cuda_layer_attend(
    const polykv_lease* lease, uint32_t layer, const polykv_attend_options* options,
    const polykv_cuda_queue* queue, void* workspace, uint64_t workspace_bytes);

/**
 * Waits for the given streams of the calling process, which may still read the lease's device memory,
 * then releases it as polykv_lease_release does. With the last lease on a segment in device memory either waits
 * for all streams of the GPU: an import is closed only when nothing can use it.
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

/** Device memory that polykv_cuda_segment_encode_layer needs for a layer while it runs. */
POLYKV_API POLYKV_NODISCARD polykv_status
polykv_cuda_encode_workspace_bytes(polykv_segment* segment, uint32_t layer, uint64_t* out);

/**
 * As polykv_segment_encode_layer, by kernels: the source's K and V are in device memory, where a model on
 * the GPU left them, and the stream's work is waited for first, so what it
 * writes to K, V or the workspace is there. Returns once the layer is encoded. Of a segment from
 * polykv_cuda_segment_begin the queue's GPU is that of the segment (device -1 or its number), and the payload
 * stays on it; of one from polykv_segment_begin, also of polykvd with documents in host memory, device is the
 * number of the GPU that has K and V, and the payload is copied back. workspace: 256-byte aligned, of
 * that GPU, one for each call at a time. Errors: those of polykv_segment_encode_layer, WRONG_DEVICE,
 * UNSUPPORTED (head_dims above 256, paper-k8v3 with a V head_dim of 8, no CUDA library or none with kernels),
 * INVALID_ARGUMENT (workspace), DEVICE_LOST.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_cuda_segment_encode_layer(
    polykv_segment* segment, uint32_t layer, const polykv_kv_source* source,
    const polykv_cuda_queue* queue, void* workspace, uint64_t workspace_bytes);

#ifdef __cplusplus
}
#endif

#endif
