/*
 * polykv: how polykvd is. Included by polykv.h; see there for errors and threads.
 */
#ifndef POLYKV_DAEMON_STATUS_H
#define POLYKV_DAEMON_STATUS_H

#include "polykv/polykv.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct polykv_daemon_status {
  size_t struct_size;
  uint64_t epoch; /* differs after each start of the daemon */
  char version[32];
  int64_t pid;
  int64_t uptime_ms;
  uint64_t budget_bytes;
  uint64_t stored_bytes;   /* reserved, filling and sealed segments */
  uint64_t retiring_bytes; /* still charged to processes that hold them */
  uint64_t document_count;
  uint64_t segment_count;
  uint64_t lease_count;
  uint64_t session_count;
  uint64_t worker_count;
  uint64_t tokens_prefilled_total; /* by polykv-prefill, since the start */
  uint64_t tokens_committed_total; /* by every producer */
  uint64_t evicted_documents_total;
  uint64_t fingerprint_cache_hits_total;
  uint64_t fingerprint_cache_misses_total;
  char backing[16];       /* where documents are: "memfd" or "cuda" */
  char backing_note[512]; /* why it is not what polykvd was asked for; else empty */
  char device_name[128];  /* of "cuda", as what follows */
  char device_uuid[48];
  uint64_t device_total_bytes;
  uint64_t device_free_bytes;    /* when polykvd last looked */
  uint64_t device_reserve_bytes; /* left free for other programs */
  uint32_t device_driver;        /* the CUDA version of its driver, 13000 is 13.0 */
  uint32_t device_runtime;       /* and of its CUDA runtime */
} polykv_daemon_status;
POLYKV_API void polykv_daemon_status_init(polykv_daemon_status* status);
POLYKV_API POLYKV_NODISCARD polykv_status polykv_session_daemon_status(polykv_session* session,
                                                                       polykv_daemon_status* out);

#ifdef __cplusplus
}
#endif

#endif
