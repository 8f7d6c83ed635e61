/*
 * The status codes of polykv: one list for the C ABI, the wire and the exit codes of polykvctl.
 *
 * A code's number never changes and is never used again. polykvctl exits with the number of the
 * status that ended it (0 when all went well), so the table below is also the table of exit codes.
 * C11 and C++20.
 */
#ifndef POLYKV_STATUS_H
#define POLYKV_STATUS_H

/* X(name, number, text): `text` says what the code means, for every object and operation alike. */
#define POLYKV_STATUS_LIST(X)                                                                \
  X(OK, 0, "success")                                                                        \
  X(ERR_INTERNAL, 1, "a defect in polykv")                                                   \
  X(ERR_INVALID_ARGUMENT, 2, "an argument is wrong")                                         \
  X(ERR_NOT_FOUND, 3, "no such document, model or lease")                                    \
  X(ERR_ALREADY_EXISTS, 4, "the name is taken by another document")                          \
  X(ERR_BUSY, 5, "somebody else is producing this document")                                 \
  X(ERR_TIMEOUT, 6, "the deadline passed")                                                   \
  X(ERR_STALE, 7, "the handle is of an earlier daemon, or was released already")             \
  X(ERR_FORKED, 8, "the handle was made before fork() and belongs to the parent process")    \
  X(ERR_DAEMON_UNREACHABLE, 9, "no polykvd accepts connections")                             \
  X(ERR_DAEMON_GONE, 10, "the connection to polykvd has ended")                              \
  X(ERR_PROTOCOL, 11, "a message broke the protocol")                                        \
  X(ERR_VERSION, 12, "the versions do not fit")                                              \
  X(ERR_PERMISSION, 13, "not allowed for this user")                                         \
  X(ERR_BUDGET, 14, "the daemon's memory budget or this machine's memory does not allow it") \
  X(ERR_LIMIT, 15, "a limit was reached")                                                    \
  X(ERR_CORRUPT, 16, "the data is damaged")                                                  \
  X(ERR_UNSUPPORTED, 17, "this combination is not supported")                                \
  X(ERR_SYSTEM, 18, "a system call failed")                                                  \
  X(ERR_CANCELLED, 19, "cancelled")                                                          \
  X(ERR_PRODUCER_LOST, 20, "the producer died or stalled before the document was complete")  \
  X(ERR_MODEL_FORMAT, 21, "the model file is malformed")                                     \
  X(ERR_MODEL_UNSUPPORTED, 22, "the model is well formed but not supported")                 \
  X(ERR_EMPTY_DOCUMENT, 23, "the document has no tokens")                                    \
  X(ERR_CONTEXT_EXCEEDED, 24, "the document is longer than the model's context")             \
  X(ERR_NO_MEMORY, 25, "memory could not be allocated")                                      \
  X(ERR_WORKER, 26, "polykv-prefill failed")                                                 \
  X(ERR_DEVICE_LOST, 27, "the GPU stopped working")                                          \
  X(ERR_WRONG_DEVICE, 28, "the document is in the memory of another GPU")

typedef enum polykv_status {
#define POLYKV_STATUS_ENUM(name, number, text) POLYKV_##name = number,
  POLYKV_STATUS_LIST(POLYKV_STATUS_ENUM)
#undef POLYKV_STATUS_ENUM
} polykv_status;

#endif
